"""Reading the metrics page, and telling a quiet server from a busy one."""

from server.traffic import Quiet, Traffic, read

PAGE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
nv_inference_request_success{model="tokenizer",version="1"} 100
nv_inference_request_success{model="detokenizer",version="1"} 40
nv_inference_request_success{model="detokenizer",version="2"} 2
nv_inference_request_failure{model="detokenizer",reason="OTHER",version="1"} 1
nv_inference_request_duration_us{model="detokenizer",version="1"} 123456
nv_trt_llm_request_metrics{model="engine",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="engine",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="engine",request_type="max",version="1"} 64
"""


def test_answers_are_those_of_the_last_model_and_live_is_all_but_the_maximum():
    assert read(PAGE, "detokenizer") == Traffic(answered=43, live=5)


def test_what_waits_in_queues_and_what_the_detokenizer_has_is_counted():
    page = PAGE + (
        'nv_inference_pending_request_count{model="detokenizer",version="1"} 4\n'
        'nv_inference_pending_request_count{model="tokenizer",version="1"} 1\n'
        'trident_open_streams{model="detokenizer"} 2\n'
    )
    assert read(page, "detokenizer") == Traffic(answered=43, live=5, beside=7)


def test_a_server_whose_engine_is_empty_is_not_quiet_while_text_is_still_to_come():
    quiet = Quiet(0.5)
    history = [
        quiet(Traffic(5, 0, beside), now_s) for now_s, beside in ((0, 1), (9, 1), (10, 0), (10.25, 0), (10.5, 0))
    ]
    assert history == [False] * 4 + [True]


def test_steps_are_the_engines_iteration_counter():
    page = (
        'nv_trt_llm_general_metrics{general_type="iteration_counter",model="engine",version="1"} 321\n'
        'nv_trt_llm_general_metrics{general_type="timestamp",model="engine",version="1"} 99\n'
    )
    assert read(PAGE + page, "detokenizer") == Traffic(answered=43, live=5, steps=321)


def test_an_engine_without_gauges_has_no_live_count():
    assert read("", "detokenizer") == Traffic(answered=0, live=None)


def verdicts(*history):
    """history: (time in s, answered, live); quiet means half a second."""
    quiet = Quiet(0.5)
    return [quiet(Traffic(answered, live), now_s) for now_s, answered, live in history]


def test_quiet_needs_an_empty_engine_and_no_answers_for_so_long():
    assert verdicts((0.0, 5, 1), (0.5, 6, 0), (1.0, 7, 0), (1.25, 7, 0), (1.5, 7, 0)) == [False] * 4 + [True]


def test_a_late_answer_or_a_late_request_starts_the_clock_again():
    history = [(0.0, 5, 0), (0.25, 6, 0), (0.75, 6, 1), (1.0, 6, 0), (1.25, 6, 0), (1.5, 6, 0)]
    assert verdicts(*history) == [False] * 5 + [True]


def test_an_engine_that_stands_still_is_not_quiet():
    assert not any(verdicts((0.0, 5, 1), (9.0, 5, 1)))


def test_a_server_that_cannot_count_is_never_called_quiet():
    assert not any(verdicts((0.0, 5, None), (9.0, 5, None)))
