"""The tensors of the ensemble (text in, text out) and of the engine (token ids in and out).

The ensemble's names are those of the TensorRT-LLM 1.x ensemble, so its clients work unchanged; the engine's are the C++
``tensorrtllm`` backend's. Our additions are marked. A test compares every ``config.pbtxt`` with these tables. Dims are
without the batch dimension, which Triton puts first (always 1 here), so a scalar is sent as ``[1, 1]``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """One tensor. datatype: KServe's. dims: without the batch's, -1 for any size. ours: not TensorRT-LLM's."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    ours: bool = False


def _t(name: str, datatype: str, *dims: int, optional: bool = True, ours: bool = False) -> Tensor:
    return Tensor(name, datatype, dims or (1,), optional, ours)


# Of both: what the tokenizer passes on to the engine.
_PASSED_ON = (
    _t("num_return_sequences", "INT32"),
    _t("exclude_input_in_output", "BOOL"),  # true unless sent, so that stream=false and stream=true agree
    _t("end_id", "INT32"),  # -1: no end token
    _t("pad_id", "INT32"),
    _t("temperature", "FP32"),
    _t("min_p", "FP32", ours=True),
    _t("repetition_penalty", "FP32"),
    _t("min_tokens", "INT32"),
    _t("presence_penalty", "FP32"),
    _t("frequency_penalty", "FP32"),
    _t("seed", "UINT64"),
    _t("return_log_probs", "BOOL"),
    _t("num_top_log_probs", "INT32", ours=True),  # 0 to 20 likeliest ids per position
    _t("return_prompt_log_probs", "BOOL", ours=True),  # an echoed prompt's ids have log probabilities too
    _t("return_context_logits", "BOOL"),
    _t("return_generation_logits", "BOOL"),
    _t("return_perf_metrics", "BOOL"),
    _t("return_num_input_tokens", "BOOL"),
    _t("return_num_output_tokens", "BOOL"),
    _t("beam_width", "INT32"),
    _t("lora_task_id", "UINT64"),  # number of an adapter of the engine, from 1; 0 for none
    _t("guided_decoding_guide_type", "BYTES"),
    _t("guided_decoding_guide", "BYTES"),
)

ENSEMBLE_INPUTS = (
    _t("text_input", "BYTES"),  # the prompt; exactly one of text_input, messages and input_ids
    _t("messages", "BYTES", ours=True),  # JSON list of {"role", "content"}; the model's chat template is applied
    _t("tools", "BYTES", ours=True),  # JSON list of functions as OpenAI describes them; for messages only
    _t("chat_template_kwargs", "BYTES", ours=True),  # JSON object of variables of the chat template
    _t("input_ids", "INT32", -1, ours=True),  # the prompt as token ids; no special tokens are added
    _t("truncate_prompt_tokens", "INT32", ours=True),  # keep the prompt's last so many tokens; -1: as many as fit
    _t("continue_ids", "INT32", -1, ours=True),  # ids that were generated already; the output goes on behind them
    _t("max_tokens", "INT32"),
    _t("bad_words", "BYTES", -1),
    _t("stop_words", "BYTES", -1),  # matched on text, across token borders
    _t("stop_token_ids", "INT32", -1, ours=True),
    _t("ignore_eos", "BOOL", ours=True),
    _t("top_k", "INT32"),
    _t("top_p", "FP32"),
    _t("length_penalty", "FP32"),
    _t("min_length", "INT32", ours=True),  # the older name of min_tokens
    _t("random_seed", "UINT64", ours=True),  # the older name of seed
    _t("stream", "BOOL"),
    _t("skip_special_tokens", "BOOL", ours=True),
    _t("include_stop_in_output", "BOOL", ours=True),
    _t("embedding_bias_words", "BYTES", -1),
    _t("embedding_bias_weights", "FP32", -1),
    _t("lora_name", "BYTES", ours=True),  # an adapter's name, in place of lora_task_id
    *_PASSED_ON,
)

ENSEMBLE_OUTPUTS = (
    _t("text_output", "BYTES", -1),
    _t("output_ids", "INT32", -1, ours=True),  # the ids this response adds
    _t("cum_log_probs", "FP32", -1),
    _t("output_log_probs", "FP32", -1, -1),  # [beam, ids of this response]
    _t("top_log_probs_ids", "INT32", -1, -1, ours=True),  # [ids of this response, k], likeliest first
    _t("top_log_probs", "FP32", -1, -1, ours=True),
    _t("finish_reason", "BYTES", ours=True),  # "" while running; see generation.FinishReason
    _t("stop_reason", "BYTES", ours=True),  # the stop string or id that matched
    _t("error_message", "BYTES", ours=True),  # errors.to_text when finish_reason is "error"
    _t("num_input_tokens", "INT32"),
    _t("num_output_tokens", "INT32"),
    _t("num_cached_tokens", "INT32", ours=True),
    _t("arrival_time_ns", "INT64"),
    _t("first_scheduled_time_ns", "INT64"),
    _t("first_token_time_ns", "INT64"),
    _t("last_token_time_ns", "INT64"),
    _t("stage_time_ns", "INT64", 3, ours=True),  # ids ready; last ids at the detokenizer; its text ready
)

ENGINE_INPUTS = (
    _t("input_ids", "INT32", -1),
    _t("input_lengths", "INT32", optional=False),
    _t("num_continued_tokens", "INT32", ours=True),  # the last so many of input_ids were generated already
    _t("request_output_len", "INT32", optional=False),
    _t("stop_words_list", "INT32", 2, -1),  # row 0 ids, row 1 inclusive end offsets padded with -1
    _t("bad_words_list", "INT32", 2, -1),
    _t("embedding_bias", "FP32", -1),
    _t("runtime_top_k", "INT32"),
    _t("runtime_top_p", "FP32"),
    _t("len_penalty", "FP32"),
    _t("stop", "BOOL"),
    _t("streaming", "BOOL"),
    _t("stream_options", "BYTES", ours=True),  # opaque to the engine; returned with the first response
    _t("tokenizer_time_ns", "INT64", 2, ours=True),  # CLOCK_MONOTONIC: request arrived, ids ready
    *_PASSED_ON,
)

ENGINE_OUTPUTS = (
    _t("output_ids", "INT32", -1, -1),  # [beam, new ids]
    _t("sequence_length", "INT32", -1),  # [beam]: new ids of this response
    _t("cum_log_probs", "FP32", -1),
    _t("output_log_probs", "FP32", -1, -1),
    _t("top_log_probs_ids", "INT32", -1, -1, ours=True),  # [new ids, k]
    _t("top_log_probs", "FP32", -1, -1, ours=True),
    _t("num_input_tokens", "INT32"),
    _t("num_output_tokens", "INT32"),
    _t("arrival_time_ns", "INT64"),
    _t("first_scheduled_time_ns", "INT64"),
    _t("first_token_time_ns", "INT64"),
    _t("last_token_time_ns", "INT64"),
    _t("stream_state", "INT64", -1, ours=True),  # the whole response, see python_backends/ensemble/token_increment.py
    # These two only together and without others, for ensemble_packed (python_backends/cpu_engine/packed_sink.py).
    _t("packed_delta", "UINT8", -1, ours=True),
    _t("watch", "INT64", 3, ours=True),  # epoch, key and instant of a look at a stream's client; zeros for none
)
