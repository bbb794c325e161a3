"""SGLang as a resource: the deployment's settings for programs, and the end of a server's log in the run's log."""

from pathlib import Path

import dagster as dg

from draftworks.config.capture import SGLangSpec
from resources.sglang_server import SGLangServer


def test_programs_get_the_settings_of_the_deployment():
    spec = SGLangSpec(python="/sglang/bin/python", start_timeout_s=7, request_timeout_s=8, attempts=2, grace_s=3)
    assert SGLangServer(**spec.model_dump()).spec == spec


def run_with(folder: Path, fails: bool) -> list[str]:
    """Messages in the log of a run whose step had a server with its files in `folder`."""

    @dg.asset
    def serving(context: dg.AssetExecutionContext, sglang: SGLangServer) -> None:
        with sglang.log_output_of_server(context, folder):
            sglang.locate_log(folder).write_text(
                "".join(f"line {number}\n" for number in range(9000)) + "out of memory\n"
            )
            if fails:
                raise dg.Failure("no answer")

    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"sglang": SGLangServer(python="/nowhere")}
        result = dg.materialize([serving], resources=resources, instance=instance, raise_on_error=False)
        assert result.success is not fails
        return [entry.user_message for entry in instance.all_logs(result.run_id)]


def test_after_a_failure_the_end_of_the_servers_log_is_in_the_runs_log(tmp_path):
    [told] = [message for message in run_with(tmp_path, fails=True) if "the end of" in message]
    assert str(tmp_path / "sglang.log") in told
    assert told.rstrip().endswith("out of memory")
    assert "line 0\n" not in told


def test_after_a_success_one_line_says_where_the_servers_log_is(tmp_path):
    [told] = [message for message in run_with(tmp_path, fails=False) if "sglang.log" in message]
    assert told == f"the server's log is {tmp_path / 'sglang.log'}"


def test_a_server_that_never_started_has_no_log_to_tell(tmp_path):
    @dg.asset
    def serving(context: dg.AssetExecutionContext, sglang: SGLangServer) -> None:
        with sglang.log_output_of_server(context, tmp_path / "absent"):
            pass

    assert dg.materialize([serving], resources={"sglang": SGLangServer(python="/nowhere")}).success
