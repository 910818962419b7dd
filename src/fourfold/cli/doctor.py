"""`fourfold doctor`: look at this machine and print the findings.

Law: the same findings as rows and as JSON; exit code 1 if any of them fails.
"""

import dataclasses
import json

from fourfold.cli.output import print_text


def run_doctor(*, as_json: bool) -> int:
    """`fourfold doctor`; returns the exit code."""
    from fourfold.doctor.checks import check_machine, exit_code, format_findings
    from fourfold.doctor.machine_probe import probe_machine

    facts = probe_machine()
    if not facts.torch_problem:
        from fourfold.doctor.gloo_probe import measure_gloo

        facts = dataclasses.replace(facts, gloo=measure_gloo())
    findings = check_machine(facts)
    if as_json:
        print(json.dumps([_json_row(dataclasses.asdict(finding)) for finding in findings], indent=2))
    else:
        print_text(format_findings(findings))
    return exit_code(findings)


def _json_row(row: dict[str, str]) -> dict[str, str]:
    """A finding with `try` for `attempt`, as in the table of text: `try` is a keyword in Python only."""
    return {("try" if name == "attempt" else name): value for name, value in row.items()}
