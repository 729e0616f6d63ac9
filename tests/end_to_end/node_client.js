// Node's own gRPC client at a Trident server, with nothing of ours but the address. Prints one JSON object a line.
//   node node_client.js DESCRIPTORS URL stream PROMPT MAX_TOKENS    every message of one generation
//   node node_client.js DESCRIPTORS URL cancel PROMPT MAX_TOKENS    the same, left after the third message
//   node node_client.js DESCRIPTORS URL ask                         ServerReady and ModelMetadata
// The loader makes of a map a list of entries. DESCRIPTORS: a FileDescriptorSet of the KServe service, serialized. Needs @grpc/grpc-js and @grpc/proto-loader.
const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [descriptors, url, verb, prompt, maxTokens] = process.argv.slice(2);
const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors), {keepCase: true, longs: Number});
const Service = grpc.loadPackageDefinition(definition).inference.GRPCInferenceService;
const client = new Service(url, grpc.credentials.createInsecure());
const say = (object) => console.log(JSON.stringify(object));

function bytes(text) {
  const data = Buffer.from(text, 'utf8');
  const size = Buffer.alloc(4);
  size.writeUInt32LE(data.length);
  return Buffer.concat([size, data]);
}

function int32(value) {
  const data = Buffer.alloc(4);
  data.writeInt32LE(value);
  return data;
}

function asked() {
  const inputs = [
    ['text_input', 'BYTES', bytes(prompt)],
    ['max_tokens', 'INT32', int32(Number(maxTokens))],
    ['temperature', 'FP32', Buffer.alloc(4)],
    ['ignore_eos', 'BOOL', Buffer.from([1])],
    ['stream', 'BOOL', Buffer.from([1])],
  ];
  return {
    model_name: 'ensemble',
    id: 'from-node',
    parameters: [{key: 'triton_enable_empty_final_response', value: {bool_param: true}}],
    inputs: inputs.map(([name, datatype]) => ({name, datatype, shape: [1, 1]})),
    raw_input_contents: inputs.map(([, , raw]) => raw),
  };
}

function read(message) {
  const response = message.infer_response || {};
  const texts = (response.outputs || []).map((output, n) => [output.name, response.raw_output_contents[n]]);
  const text = new Map(texts).get('text_output');
  return {
    text: text ? text.subarray(4).toString('utf8') : '',
    final: (response.parameters || []).some((one) => one.key === 'triton_final_response' && one.value.bool_param),
    id: response.id || '',
    error: message.error_message || '',
  };
}

function stream(leaveAfter) {
  const call = client.ModelStreamInfer(new grpc.Metadata(), {deadline: Date.now() + 60000});
  let seen = 0;
  call.on('data', (message) => {
    say(read(message));
    seen += 1;
    if (seen === leaveAfter) call.cancel();
  });
  call.on('error', (error) => say({status: error.code, details: error.details}));
  call.on('end', () => client.close());
  call.write(asked());
  call.end();
}

function ask() {
  client.ServerReady({}, (error, ready) => {
    client.ModelMetadata({name: 'ensemble'}, (failed, model) => {
      say({ready: ready.ready, inputs: model.inputs.map((input) => input.name)});
      client.close();
    });
  });
}

if (verb === 'ask') ask();
else stream(verb === 'cancel' ? 3 : 0);
