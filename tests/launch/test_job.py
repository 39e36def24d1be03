"""launch/job.sh: a job is requeued only if it saved a checkpoint since its start; a node that others cannot reach is named."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "launch" / "job.sh"
# Takes what the job's first lines do, then a save by rename as the recipes do it, then the end of the time.
SCRIPT = """
. "$1"; CHECKPOINT_DIR=$2 SLURM_JOB_ID=7 MODULE=
scontrol() { if [ "$2" = show ]; then echo "${SHOWN-}"; else echo "scontrol $*"; fi; }
first_step=$(saved_step)
if [ -n "$3" ]; then echo "$3" >"$2/new"; mv "$2/new" "$2/latest_checkpointed_iteration.txt"; fi
requeue
"""


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script, of which $1 is launch/job.sh."""
    command = ["bash", "-euo", "pipefail", "-c", script, "job", str(JOB), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("before", "saved", "is_requeued"),
    [("", "", False), ("", "6", True), ("6", "", False), ("6", "9", True)],
    ids=["never", "first", "not since", "another step"],
)
def test_a_job_is_requeued_if_it_has_saved(tmp_path: Path, before: str, saved: str, is_requeued: bool) -> None:
    if before:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(before)
    result = run(SCRIPT, str(tmp_path), saved)
    assert ("scontrol requeue 7" in result.stdout) == is_requeued, result.stdout + result.stderr
    assert result.returncode == (0 if is_requeued else 1)
    assert ("not requeued: no checkpoint was written" in result.stdout) == (not is_requeued)


@pytest.mark.parametrize(
    ("shown", "is_requeued"),
    [
        ("StartTime=2026-11-27T02:53:10 PreemptEligibleTime=2026-11-27T02:53:10 PreemptTime=2026-11-27T02:53:14", True),
        ("StartTime=2026-11-27T02:53:10 PreemptEligibleTime=2026-11-27T02:53:10 PreemptTime=None", False),
        (
            "StartTime=2026-11-27T02:53:10 PreemptEligibleTime=2026-11-27T02:53:10 PreemptTime=2026-11-26T14:00:00",
            False,
        ),
    ],
    ids=["now", "never", "in an earlier start"],
)
def test_a_job_that_is_preempted_is_requeued_although_it_has_not_saved(
    tmp_path: Path, shown: str, is_requeued: bool
) -> None:
    result = run(SCRIPT, str(tmp_path), "", SHOWN=f"JobId=7 {shown} SuspendTime=None")
    assert ("scontrol requeue 7" in result.stdout) == is_requeued, result.stdout + result.stderr
    assert ("the next start begins anew" in result.stdout) == is_requeued


def test_the_last_task_of_an_array_acts_for_itself_alone(tmp_path: Path) -> None:
    """Its number stands for all tasks in Slurm's commands: the others would be stopped and requeued with it."""
    script = """
    . "$1"; CHECKPOINT_DIR= RUN_DIR=$2 SLURM_JOB_ID=7 MODULE= STOP_SECONDS=0 step=1000000000 time_is_up=
    for name in scontrol scancel; do eval "$name() { echo $name \\$* >>$RUN_DIR/said; }"; done
    is_preempted || true; stop_ranks; CHECKPOINT_DIR=$2 first_step=none; requeue
    """
    run(script, str(tmp_path), SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3").check_returncode()
    said = (tmp_path / "said").read_text().splitlines()
    assert {"scancel --signal=TERM 7_3", "scontrol requeue 7_3", "scontrol --oneliner show job 7_3"} == set(said)


@pytest.mark.parametrize(("address", "is_named"), [("127.0.1.1", True), ("10.77.0.2", False), ("", False)])
def test_a_node_that_resolves_its_own_name_to_itself_is_named(address: str, is_named: bool) -> None:
    script = (
        '. "$1"; SLURM_JOB_ID=7; getent() { [ -z "$ADDRESS" ] || echo "$ADDRESS STREAM $2"; }; check_address; echo on'
    )
    result = run(script, ADDRESS=address)
    named = f"warning: {socket.gethostname()} knows itself as {address}, where gloo of other nodes cannot reach it"
    assert (named in result.stdout) == is_named, result.stdout + result.stderr
    assert result.returncode == 0 and result.stdout.endswith("on\n")
