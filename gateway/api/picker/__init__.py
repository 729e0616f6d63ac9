"""The endpoint picker: Envoy asks over ext_proc which replica gets a request that Envoy forwards by itself."""
