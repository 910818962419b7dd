"""Laws of decoding: any content of a file is decoded, or refused with one kind of error."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.checkpoint.store import read_manifest, verify_checkpoint
from fourfold.launcher import failure_report
from fourfold.plan.decode import (
    MAX_DEPTH,
    MAX_LINE_LENGTH,
    MAX_TOML_CHARS,
    DecodeError,
    from_json,
    from_toml,
    is_too_deep,
    read_bounded,
)
from fourfold.plan.plan import Plan
from fourfold.report import page
from fourfold.report.run_record import ReportError, read_faults
from fourfold.trace.trace_file import decode_trace
from fourfold.trainer.fault_log import FAULTS_FILE
from fourfold.words.errors import CheckpointError, FourfoldError, PlanError
from tests.report_data import make_run

# The decoders fail at about 1,000 levels by themselves; code that walks through decoded values fails earlier.
DEPTHS = [MAX_DEPTH + 1, 900, 100_000]
DEEP = re.compile("nested too deeply|more than")
LEAVES = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


def dicts(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@given(value=JSON)
def test_any_json_value_is_decoded(value):
    assert from_json(json.dumps(value).encode()) == value


@given(text=st.binary() | st.text().map(str.encode))
def test_arbitrary_bytes_are_json_or_a_decode_error(text):
    with contextlib.suppress(DecodeError):
        from_json(text)


@given(text=st.text(alphabet="a.=[]{}\"'\n#1-:T", max_size=60))
def test_any_text_is_toml_or_a_decode_error(text):
    with contextlib.suppress(DecodeError):
        from_toml(text)


@pytest.mark.parametrize("depth", DEPTHS)
def test_deeply_nested_text_is_refused(depth):
    for text in (lists(depth), dicts(depth)):
        with pytest.raises(DecodeError, match="nested too deeply"):
            from_json(text.encode())
    for text in (f"a = {lists(depth)}", "a = " + "{a = " * depth + "1" + "}" * depth):
        with pytest.raises(DecodeError, match=DEEP):
            from_toml(text)


@pytest.mark.parametrize("parts", [MAX_DEPTH + 2, 100_000])
def test_dotted_keys_take_no_quadratic_memory(parts):
    with pytest.raises(DecodeError, match=DEEP):
        from_toml(".".join("a" * parts) + " = 1")


def test_a_long_toml_file_and_a_long_line_are_refused_with_the_reason():
    with pytest.raises(DecodeError, match=f"^more than {MAX_TOML_CHARS} characters"):
        from_toml("\n" * (MAX_TOML_CHARS + 1))
    with pytest.raises(DecodeError, match=r"^line 2 has more than"):
        from_toml("a = 1\n# " + "x" * MAX_LINE_LENGTH)


def test_values_just_within_the_limit_are_decoded():
    assert not is_too_deep(from_json(lists(MAX_DEPTH).encode()))


def test_a_number_beyond_the_range_of_floats_is_refused():
    with pytest.raises(DecodeError):
        from_json(b"1e999")


def test_a_file_is_not_read_beyond_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    assert len(read_bounded(tmp_path / "file", max_bytes=100)) == 100
    with pytest.raises(DecodeError, match="more than 99 bytes"):
        read_bounded(tmp_path / "file", max_bytes=99)
    with pytest.raises(DecodeError, match="more than"):
        read_bounded(Path("/dev/zero"))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["settings.json", "plan.toml", "metrics.jsonl", "trace.json"])
def test_the_report_names_a_deeply_nested_file_of_a_run(name, depth, tmp_path):
    run = make_run(tmp_path / "run")
    text = f"a = {lists(depth)}" if name == "plan.toml" else dicts(depth)
    (run / name).write_text(text + "\n")
    with pytest.raises(FourfoldError, match=r"run of|as they were written|line 1|no trace") as caught:
        page.write_report([run])
    assert str(run) in str(caught.value)


@pytest.mark.parametrize("line", [
    b"[]", b"3", b'"step"', b'{"step": "x"}', b'{"step": 1, "loss": {}}', b'{"resumed": null}', b'{"finished": {}}',
    b'{"valid": 1}', b'{"damaged": 1}',
])  # fmt: skip
def test_the_report_names_a_malformed_log_line(line, tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(line + b"\n" + (run / "metrics.jsonl").read_bytes())
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 1"):
        page.write_report([run])


def test_the_report_shows_or_names_a_log_line_that_lacks_a_field(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        extra = {"step": 6, "checkpoint": "step-00000006", "pause_seconds": 0.1}
        damaged = {"checkpoint": "step-00000004", "damaged": ["a file"]}
        file.writelines(json.dumps(line) + "\n" for line in (extra, damaged, {"resumed": 2}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    refused = 0
    for number, line in enumerate(lines):
        for name in line:
            without = [*lines[:number], {key: line[key] for key in line if key != name}, *lines[number + 1 :]]
            (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in without))
            try:
                page.write_report([run])
            except ReportError as error:
                refused += 1
                assert f"line {number + 1}" in str(error)  # noqa: PT017 (a page is right, too)
    assert refused


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_settings_that_are_not_a_json_object_are_refused(text, tmp_path):
    run = make_run(tmp_path / "run")
    (run / "settings.json").write_text(text)
    with pytest.raises(ReportError, match="the settings and the plan as they were written"):
        page.write_report([run])


@pytest.mark.parametrize("program", ["[]", "{}", "1", "null"])
def test_a_trace_whose_program_is_not_text_is_refused(program):
    with pytest.raises(FourfoldError, match="no trace of a run"):
        decode_trace(b'{"traceEvents": [], "otherData": {"program": %s}}' % program.encode())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deeply_nested_fault_is_counted(depth, tmp_path):
    (tmp_path / FAULTS_FILE).write_text(f'{{"time": 1, "kind": "x", "step": 1, "later": {lists(depth)}}}\n')
    found = read_faults(tmp_path)
    assert len(found.faults) + found.num_unreadable == 1
    assert found.num_unreadable == (depth > 1000)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deeply_nested_plan_is_refused(depth):
    with pytest.raises(PlanError, match=DEEP):
        Plan.from_toml(f"version = 1\ndp = {lists(depth)}")


@pytest.mark.parametrize("text", [lists(100_000), dicts(100_000), '{"rank": "0"}', '{"message": {"text": "torch"}}'])
def test_a_malformed_error_file_gives_no_record(text, tmp_path):
    (tmp_path / "error").write_text(text)
    assert failure_report.load_record(tmp_path / "error") is None


@pytest.mark.parametrize("text", [lists(100_000), dicts(100_000), f'{{"xxh3_128": "", "manifest": {lists(100_000)}}}'])
def test_a_deeply_nested_manifest_counts_as_damaged(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "manifest.json"))):
        read_manifest(tmp_path)
    assert len(verify_checkpoint(tmp_path)) == 1
