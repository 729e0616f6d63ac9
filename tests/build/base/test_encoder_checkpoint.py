"""An encoder's folder is read as sentence-transformers reads it, or refused with one sentence."""

import json

import pytest

from build.base.checkpoint import CheckpointError
from build.base.encoder_checkpoint import kind_of, open_encoder
from tests.fakes import tiny_encoders as tiny


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder, kind="embedding"):
    with pytest.raises(CheckpointError) as caught:
        open_encoder(folder, kind)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "kind"), [(tiny.BERT, "embedding"), (tiny.RERANKER, "rerank"), (tiny.ROBERTA_RERANKER, "rerank")]
)
def test_the_kind_of_a_checkpoint_is_its_architectures(tmp_path, config, kind):
    assert kind_of(tiny.write_bert(tmp_path, config)) == kind
    opened = open_encoder(tmp_path, kind)
    assert opened.tensors.keys() == opened.architecture.expected_tensors().keys()
    assert opened.architecture.max_positions == 64


def test_a_generating_model_is_no_encoder_and_one_with_modules_is(tmp_path):
    folder = tiny.write_qwen3(tmp_path)
    assert kind_of(folder) is None
    assert kind_of(tiny.write_sentence_files(folder, "lasttoken")) == "embedding"


@pytest.mark.parametrize(("named", "pooling"), [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_files_of_sentence_transformers_say_how_texts_become_vectors(tmp_path, named, pooling, normalize):
    folder = tiny.write_bert(tmp_path, tiny.BERT | {"matryoshka_dimensions": [16, 8, 32]})
    prompts = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    tiny.write_sentence_files(folder, named, normalize=normalize, **prompts)
    opened = open_encoder(folder, "embedding")
    found = opened.encoder
    assert (found.pooling, found.normalize, found.dimensions, opened.max_seq_len) == (pooling, normalize, 32, 32)
    assert found.prompts == prompts["prompts"] and found.default_prompt == "query"
    assert found.matryoshka_dimensions == (8, 16)
    assert {path.name for path in opened.files()} >= {"modules.json", "config.json", "model.safetensors"}


def test_newer_sentence_transformers_name_the_pooling_and_leave_the_longest_text_to_the_tokenizer(tmp_path):
    folder = tiny.write_sentence_files(tiny.write_bert(tmp_path, tiny.BERT))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "feature-extraction"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 24}))
    for named, pooling in (("cls", "cls"), (["lasttoken"], "last"), ("mean", "mean")):
        pooled = {"embedding_dimension": 32, "pooling_mode": named, "include_prompt": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
        opened = open_encoder(folder, "embedding")
        assert (opened.encoder.pooling, opened.max_seq_len) == (pooling, 24)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))  # no limit of its own
    assert open_encoder(folder, "embedding").max_seq_len == 64


def test_a_decoder_saved_without_its_head_is_an_embedding_model(tmp_path):
    folder = tiny.write_qwen3(tmp_path, bare=True)
    edit(folder / "config.json", architectures=["Qwen3Model"])
    assert kind_of(folder) == "embedding"
    assert open_encoder(folder, "embedding").architecture.name == "Qwen3ForCausalLM"
    assert "architectures must be one of BertForSequenceClassification, " in refusal(folder, "rerank")


def test_without_those_files_it_is_the_mean_of_all_tokens_and_of_a_decoder_the_last(tmp_path):
    bert = open_encoder(tiny.write_bert(tmp_path / "bert", tiny.BERT), "embedding").encoder
    decoder = open_encoder(tiny.write_qwen3(tmp_path / "qwen", bare=True), "embedding").encoder
    assert (bert.pooling, bert.normalize) == ("mean", False)
    assert (decoder.pooling, decoder.normalize) == ("last", True)


def test_qwen3s_reranker_gets_the_template_of_its_card(tmp_path):
    opened = open_encoder(tiny.write_qwen3(tmp_path), "rerank", "Find code")
    assert opened.encoder.template[1] == "<Instruct>: Find code\n<Query>: {query}\n<Document>: {document}"
    assert opened.encoder.template[0].startswith("<|im_start|>system\nJudge") and len(opened.encoder.template) == 3


@pytest.mark.parametrize(
    ("changes", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_a_cross_encoder_has_the_sigmoid_unless_its_config_says_otherwise(tmp_path, changes, sigmoid):
    assert open_encoder(tiny.write_bert(tmp_path, tiny.RERANKER | changes), "rerank").sigmoid is sigmoid


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "silu"}, "hidden_act must be one of gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        ({"hidden_size": "x"}, "hidden_size must be a positive integer, got 'x'"),
        ({"architectures": ["NomicBertModel"]}, "must be one of BertModel, XLMRobertaModel, "),
        ({"vocab_size": 60}, "embeddings.word_embeddings.weight is [64, 32]"),
        ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
    ],
)
def test_what_the_graph_cannot_compute_is_refused_by_name(tmp_path, changes, words):
    tiny.write_bert(tmp_path, tiny.BERT)
    edit(tmp_path / "config.json", **changes)
    assert words in refusal(tmp_path)


def test_an_activation_of_a_reranker_that_the_graph_lacks_is_refused(tmp_path):
    activation = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    tiny.write_bert(tmp_path, tiny.RERANKER | activation)
    assert "must be one of Sigmoid, Identity, got torch.nn.modules.activation.Tanh" in refusal(tmp_path, "rerank")


def test_a_reranker_has_one_label_and_is_no_embedding_model(tmp_path):
    tiny.write_bert(tmp_path, tiny.RERANKER)
    assert "not of kind 'embedding'" in refusal(tmp_path)
    edit(tmp_path / "config.json", id2label={"0": "a", "1": "b"})
    assert "several labels" in refusal(tmp_path, "rerank")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}],
            "Dense' is not supported",
        ),
        ("modules.json", {"type": "x"}, "must be a list of objects"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens; supported is one of"),
        ("1_Pooling/config.json", {}, "the pooling is none"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "the pooling is mean, max"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt must be true"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
    ],
)
def test_sentence_files_that_ask_for_something_else_are_refused(tmp_path, file, content, words):
    tiny.write_sentence_files(tiny.write_bert(tmp_path, tiny.BERT))
    (tmp_path / file).write_text(json.dumps(content))
    assert words in refusal(tmp_path)
