"""launch/job.sh: a job is requeued only if it saved a checkpoint since its start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "launch" / "job.sh"
# Takes what the job's first lines do, then a save by rename as the recipes do it, then the end of the time.
SCRIPT = """
. "$1"; CHECKPOINT_DIR=$2 SLURM_JOB_ID=7
scontrol() { echo "scontrol $*"; }
first_save=$(last_save)
if [ -n "$3" ]; then echo "$3" >"$2/new"; mv "$2/new" "$2/latest_checkpointed_iteration.txt"; fi
requeue
"""


@pytest.mark.parametrize(
    ("before", "saved", "is_requeued"),
    [("", "", False), ("", "6", True), ("6", "", False), ("6", "9", True), ("6", "6", True)],
    ids=["never", "first", "not since", "another step", "the same step, after a damaged checkpoint was skipped"],
)
def test_a_job_is_requeued_if_it_has_saved(tmp_path: Path, before: str, saved: str, is_requeued: bool) -> None:
    if before:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(before)
    command = ["bash", "-euo", "pipefail", "-c", SCRIPT, "job", str(JOB), str(tmp_path), saved]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ("scontrol requeue 7" in result.stdout) == is_requeued, result.stdout + result.stderr
    assert result.returncode == (0 if is_requeued else 1)
    assert ("not requeued: no checkpoint was written" in result.stdout) == (not is_requeued)
