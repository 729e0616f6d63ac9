"""The protocols callers speak: OpenAI HTTP and KServe gRPC, from bytes to requests and from deltas to bytes."""
