"""Server addresses: malformed ones are refused, and messages do not repeat credentials."""

from __future__ import annotations

import pytest

from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.strict_yaml import parse_spec
from draftworks.config.urls import parse_url, parse_urls
from draftworks.errors import ConfigError

WITH_PASSWORD = "https://me:hunter2@gateway.example/v1"


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "https://gateway.example/v1", "http://[::1]:8000/a/v1"])
def test_an_address_is_taken_as_it_is_without_its_last_slash(url):
    assert parse_url(url) == parse_url(f"{url}/") == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:30000",
        "ftp://host",
        "http://",
        "http:///v1",
        "http://host:99999",
        "http://host:0",
        "http://a b/v1",
    ],
)
def test_what_is_no_http_address_is_refused(url):
    with pytest.raises(ValueError, match=r"expected an address such as http://127.0.0.1:30000"):
        parse_url(url)


@pytest.mark.parametrize("url", ["http://host/v1?key=1", "http://host/v1#a"])
def test_an_address_ends_before_its_query(url):
    with pytest.raises(ValueError, match="must not contain a query"):
        parse_url(url)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (CaptureSpec, {"server": {"url": WITH_PASSWORD, "spool": "/s"}}),
        (CaptureSpec, {"server": {"urls": [WITH_PASSWORD], "spool": "/s"}}),
        (ResponseSpec, {"endpoint": {"server": "vllm", "base_urls": [WITH_PASSWORD]}}),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(spec, values):
    with pytest.raises(ConfigError, match="an address must not contain a user or password") as raised:
        parse_spec(spec, values, where="target.yaml")
    assert "hunter2" not in str(raised.value)


def test_one_server_is_not_named_twice():
    with pytest.raises(ValueError, match="each address may be given only once"):
        parse_urls(["http://a:1", "http://a:1/"])


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"url": "http://a:1", "urls": ["http://b:1"], "spool": "/s"}, "url and urls are alternatives"),
        ({"urls": ["http://a:1", "http://b:1"]}, "url and spool must be given together"),
        ({"spool": "/s"}, "url and spool must be given together"),
        ({"url": "http://a:1", "spool": "/s", "mooncake": "/m"}, "spool and mooncake are alternatives"),
        (
            {"urls": ["http://a:1", "http://b:1"], "spool": "/s", "replicas": 2},
            "replicas is the number of servers that Draftworks starts",
        ),
    ],
)
def test_servers_are_yours_or_ours_and_yours_have_a_spool(server, message):
    with pytest.raises(ConfigError, match=message):
        parse_spec(CaptureSpec, {"backend": "sglang_server", "server": server}, where="target.yaml")


def test_one_address_or_several_are_the_servers_that_are_running():
    assert CaptureSpec(server={"url": "http://a:1", "spool": "/s"}).server.external == ("http://a:1",)
    several = CaptureSpec(server={"urls": ["http://a:1", "http://b:1"], "spool": "/s"})
    assert several.server.external == ("http://a:1", "http://b:1")
    assert CaptureSpec().server.external == ()
    assert several.to_identity() == CaptureSpec().to_identity()


@pytest.mark.parametrize(
    "given", ["http://a:1", "http://a:1/", "http://a:1/v1/chat/completions", "http://a:1/v1/models"]
)
def test_the_address_of_a_server_or_of_a_call_is_no_base_address_of_an_api(given: str):
    with pytest.raises(ValueError, match=r"did you mean http://a:1/v1\?"):
        ResponseSpec(endpoint={"server": "vllm", "base_urls": [given]})
    assert ResponseSpec(endpoint={"server": "vllm", "base_urls": ["http://a:1/openai/v1beta"]}).endpoint is not None
