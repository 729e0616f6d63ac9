"""How requests and responses travel: what every client shares, and what the gateway, server and benchmarks build on.

Every module here is public: ``arguments`` (what ``generate`` and the constructors take), ``request`` (a valid request
from them), ``connection`` and ``channel`` (reaching one server), ``infer_request`` and ``infer_response`` (KServe's
messages), ``encoder_call`` (embeddings and scores), ``response_reader`` (the state of one response), ``token_stream``
and ``blocking_stream`` (iterators with retries), ``stream_model`` (which ensemble), ``retries``, ``failures`` (errors
of gRPC and Triton), ``status`` (health and models), ``completion``, ``latency``, ``protobuf`` (the wire format).
"""
