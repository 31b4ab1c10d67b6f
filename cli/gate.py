"""What the gate of a promotion found, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from replaylake.cli.ope import reward_text
from replaylake.cli.report import count, table_lines

if TYPE_CHECKING:
    from replaylake.offline.ope.promotion import Gate, Unanswered


def gate_lines(gate: Gate | Unanswered) -> Iterator[str]:
    """Yield what a gate found: the two policies, a table of the estimators, the reasons."""
    from replaylake.offline.ope.promotion import Unanswered

    if isinstance(gate, Unanswered):
        yield f"refused: {gate.reason}"
        return
    report = gate.candidate
    numbers = f"{count(report.num_episodes, 'episode')}, {count(report.num_steps, 'step')}"
    candidate = f"{report.policy['policy']}:{report.policy['policy_version']}"
    against = gate.against
    if gate.champion is None:
        yield (
            f"{report.policy['policy']} has no champion to compare with: compared with the mean "
            "return of the log"
        )
    else:
        against = f"{gate.champion.policy['policy']}:{gate.champion.policy['policy_version']}"
    yield (
        f"{candidate} against {against}, acting {report.policy['acts']}, on "
        f"{report.dataset}@{report.version}, {numbers}"
    )
    yield f"  reward: {reward_text(report)}"
    if gate.champion is not None and gate.champion.reward.training != report.reward.training:
        yield f"  reward of the champion: {reward_text(gate.champion)}"
    if report.left_out:
        said = ", ".join(f"{num:,} {reason}" for reason, num in report.left_out.items())
        yield f"  left out: {said}"
    for note in (*report.notes, *(gate.champion.notes if gate.champion is not None else ())):
        yield f"  note: {note}"
    is_lacking = any(one.no_interval for one in gate.comparisons)
    rows = [
        {
            "estimator": one.estimator,
            "candidate": _rounded(one.candidate),
            "champion" if gate.champion is not None else "log": _rounded(one.against),
            "difference": _rounded(one.difference),
            "from": _rounded(one.low),
            "to": _rounded(one.high),
            **({"interval": "no interval" if one.no_interval else ""} if is_lacking else {}),
        }
        for one in gate.comparisons
    ]
    if rows:
        yield ""
        yield from table_lines(rows, list(rows[0]))
    for name, why in gate.refused.items():
        yield f"no {name}: {why}"
    for who, one in (("candidate", report), ("champion", gate.champion)):
        if one is not None:
            yield f"{who}: {one.verdict}"
    for reason in gate.reasons:
        yield f"{'passed' if gate.passed else 'refused'}: {reason}"


def _rounded(value: float | None) -> float | None:
    """Return four significant digits, for a table whose columns align."""
    return None if value is None else float(f"{value:.4g}")
