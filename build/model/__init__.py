"""The model on CPU: OpenVINO graph, weights in each precision, calibration, a numpy reference of the decoder."""
