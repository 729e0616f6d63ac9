"""Use NVIDIA's tritonclient without any of ours: python -m examples.triton_client [HOST:PORT]"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, value: object, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(np.array([[value]], dtype=object if datatype == "BYTES" else np.dtype(type(value))))
    return made


def main(url: str) -> None:
    responses: queue.Queue = queue.Queue()
    inputs = [
        tensor("text_input", b"def fibonacci(n):", "BYTES"),
        tensor("max_tokens", np.int32(16), "INT32"),
        tensor("stream", np.bool_(True), "BOOL"),
    ]
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get()
            if error is not None:
                raise error
            text = result.as_numpy("text_output")
            if text is not None:
                print(text.flat[0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
