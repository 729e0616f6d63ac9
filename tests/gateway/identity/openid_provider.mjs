// A real OpenID provider for tests: node openid_provider.mjs NODE_MODULES PORT KEY_ID ALGORITHM TTL_S
// prints its issuer once it serves.
import { generateKeyPairSync } from "node:crypto";
import { createServer } from "node:http";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [modules, port, kid, alg, ttl] = process.argv.slice(2);
const { default: Provider } = await import(pathToFileURL(path.join(modules, "oidc-provider", "lib", "index.js")));
const pair = alg === "ES256" ? ["ec", { namedCurve: "P-256" }] : ["rsa", { modulusLength: 2048 }];
const key = generateKeyPairSync(...pair).privateKey.export({ format: "jwk" });

const server = createServer();
server.listen(Number(port), "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const resource = (audience) => ({
    scope: "infer trident.admin", audience, accessTokenFormat: "jwt", accessTokenTTL: Number(ttl), jwt: { sign: { alg } },
  });
  const provider = new Provider(issuer, {
    clients: ["app", "admin"].map((client_id) => ({
      client_id, client_secret: "secret", grant_types: ["client_credentials"], redirect_uris: [], response_types: [],
      id_token_signed_response_alg: alg,
    })),
    jwks: { keys: [{ ...key, kid, alg, use: "sig" }] },
    features: {
      clientCredentials: { enabled: true },
      devInteractions: { enabled: false },
      resourceIndicators: {
        enabled: true,
        defaultResource: () => "urn:trident",
        getResourceServerInfo: (ctx, indicator) => resource(indicator.replace("urn:", "")),
      },
    },
    extraTokenClaims: (ctx, token) => ({
      groups: ["/staff", "/trident/research"], roles: { trident: token.clientId === "admin" ? ["operator"] : [] },
    }),
    ttl: { ClientCredentials: Number(ttl) },
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
