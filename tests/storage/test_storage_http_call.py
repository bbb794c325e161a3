"""One HTTP call: bounded in time and size as a whole, and no secret is repeated."""

from __future__ import annotations

import threading

import pytest
from json_server import QuietHandler, Reply, json_server, serve

from draftworks.storage.http_call import HttpClient, NoAnswerError


def test_an_answer_that_trickles_in_is_given_up_when_its_time_is_over():
    """Each piece comes within the limit, the whole answer does not."""
    given_up = threading.Event()

    class Trickling(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while not given_up.wait(0.05):
                self.wfile.write(b"x")

    with serve(Trickling) as url, HttpClient(url, 0.3, setting="where it is set") as http:
        with pytest.raises(NoAnswerError, match=r"^/a: no whole answer within 0.3 s \(where it is set\)$"):
            http.call("GET", "/a")
        given_up.set()


def test_an_answer_that_is_too_long_is_refused_and_an_error_is_cut_for_its_message():
    with (
        json_server(lambda request: Reply(request.body["status"], "x" * 200_000)) as url,
        HttpClient(url, 30.0) as http,
    ):
        with pytest.raises(NoAnswerError, match="an answer of more than 1,000 bytes"):
            http.call("POST", body={"status": 200}, max_bytes=1000)
        assert len(http.call("POST", body={"status": 500}, max_bytes=1000).content) < 200_000
        assert len(http.call("POST", body={"status": 200}).content) == 200_000


def test_a_secret_is_in_no_message():
    with json_server(lambda _: Reply(401, "no s3cret")) as url:
        with HttpClient(url, 30.0, hidden={"s3cret": "***"}) as http:
            assert http.call("POST", body={}).quoted == "no ***"
        with pytest.raises(NoAnswerError, match=r"\*\*\*"):
            http.call("POST", "/s3cret", {})
