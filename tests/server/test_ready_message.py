"""The message of a ready server."""

from server.ready_message import ready_message
from server.settings import ROOT, Settings


def test_endpoints_and_engine_are_listed():
    text = ready_message(Settings(engine="mine", grpc_port=9001, http_port=9000, metrics_port=9002))
    assert "engine mine" in text and "127.0.0.1:9001" in text and "http://127.0.0.1:9002/metrics" in text
    assert "curl -N http://127.0.0.1:9000/v2/models/ensemble/generate_stream" in text


def test_the_client_command_names_the_url_only_if_it_is_not_the_default():
    assert "--url" not in ready_message(Settings())
    assert "-m clients --url 127.0.0.1:9001 " in ready_message(Settings(grpc_port=9001))


def test_tls_is_mentioned_only_if_it_is_on():
    assert "TLS" not in ready_message(Settings())
    certificates = ROOT / "tests" / "clients" / "certificates"
    settings = Settings(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    assert "ModelStreamInfer over TLS" in ready_message(settings)


def test_the_admin_key_is_not_printed():
    assert "secret-key" not in ready_message(Settings(admin_key="secret-key"))


def test_an_encoder_is_called_by_its_own_name():
    text = ready_message(Settings(), "encoder")
    assert "model encoder, ModelInfer\n" in text and "/v2/models/encoder/infer" in text and "clients" not in text
