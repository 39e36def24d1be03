"""The doctor's judgement of versions and environment, each with a planted fault."""

from __future__ import annotations

import os
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

from overlap_train.tools.doctor import command, environment, toolchain, versions
from overlap_train.tools.doctor.environment import WITHOUT_MULTICAST
from overlap_train.tools.doctor.examination import Examination
from overlap_train.tools.doctor.flags import Doctor
from overlap_train.tools.doctor.job import Job
from overlap_train.tools.doctor.report import FAIL, OK, WARN, Finding, ok
from tests.unit.doctor_cases import only

ROOT = Path(__file__).parents[2]


def inventory(**changed: str | None) -> versions.Inventory:
    installed: dict[str, str | None] = {
        "overlap-train": "0.1.0",
        "torch": "2.11.0+cu130",
        "rich": "15.0.0",
        "triton": "3.6.0",
        "megatron-core": "0.19.2",
        "nvshmem4py-cu13": "0.4.1",
        "nvidia-nvshmem-cu13": "3.4.5",
        "nvidia-nccl-cu13": "2.28.9",
        "cuda-bindings": "13.4.4",
        "cuda-core": "1.2.2",
    }
    installed |= {name.replace("_", "-"): version for name, version in changed.items()}
    demands = (
        versions.Demand("overlap-train", "torch", ">=2.11"),
        versions.Demand("overlap-train", "megatron-core", "<0.20,>=0.16"),
        versions.Demand("overlap-train", "nvshmem4py-cu13", ">=0.4.1"),
        versions.Demand("torch", "triton", "==3.6.0"),
    )
    return versions.Inventory({name: v for name, v in installed.items() if v is not None}, demands, "13.0")


def test_versions_that_fit_are_ok() -> None:
    assert {finding.status for finding in versions.check_versions(inventory())} == {OK}


def test_a_version_below_our_range_fails_with_its_command() -> None:
    wrong = only(versions.check_versions(inventory(megatron_core="0.15.3")), FAIL)
    assert (wrong.name, wrong.measured) == ("version megatron-core", "0.15.3")
    assert wrong.fix == 'pip install "megatron-core<0.20,>=0.16"'


@pytest.mark.parametrize("version", ["0.20.0", "0.20.1rc0", "1.0"])
def test_a_version_above_our_range_is_a_warning(version: str) -> None:
    newer = only(versions.check_versions(inventory(megatron_core=version)), WARN)
    assert (newer.name, newer.measured) == ("version megatron-core", f"{version}: newer than tested")


def test_a_version_that_another_package_refuses_is_a_warning_that_names_the_package() -> None:
    wrong = only(versions.check_versions(inventory(triton="3.9.0")), WARN)
    assert wrong.name == "version triton" and "torch 2.11.0" in wrong.expected and "==3.6.0" in wrong.fix


def test_a_missing_extra_is_a_warning_and_a_missing_requirement_a_failure() -> None:
    missing = only(versions.check_versions(inventory(nvshmem4py_cu13=None)), WARN)
    assert missing.fix == "pip install nvshmem4py-cu13 cuda-core"
    assert only(versions.check_versions(inventory(torch=None)), FAIL).name == "version torch"


def test_a_machine_without_gpu_lacks_nothing_of_gpus() -> None:
    found = versions.check_versions(inventory(nvshmem4py_cu13=None, cuda_core=None), on_gpu=False)
    assert {finding.status for finding in found} == {OK}
    (line,) = [finding for finding in found if finding.name == "version nvshmem4py-cu13"]
    assert line.measured.startswith("not installed; only GPUs use it, for the provider nvshmem")
    assert only(versions.check_versions(inventory(torch=None), on_gpu=False), FAIL).name == "version torch"


def test_nvshmem_and_torch_for_different_cuda_versions_fail() -> None:
    mixed = versions.Inventory(inventory().versions, inventory().demands, "12.8")
    assert only(versions.check_versions(mixed), FAIL).name == "version cuda"


def test_a_rank_with_another_version_is_named() -> None:
    same = [Finding("version torch", OK, "2.11.0", rank=rank, host=f"node{rank}") for rank in (0, 1, 3)]
    (odd,) = versions.disagreements([*same, Finding("version torch", OK, "2.13.0", rank=2, host="node2")])
    assert (odd.status, odd.rank, odd.host, odd.measured) == (FAIL, 2, "node2", "2.13.0")
    assert versions.disagreements(same) == []


def test_ranges_are_those_of_the_project_file() -> None:
    """One source: whatever pyproject.toml says is what is checked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {d.package: d for d in versions.read_inventory().demands if d.by == "overlap-train"}
    extra = project["optional-dependencies"]["megatron"][0]
    assert SpecifierSet(ours["megatron-core"].range) == SpecifierSet(extra.removeprefix("megatron-core"))
    assert {"torch", "triton", "nvshmem4py-cu13", "nvidia-nvshmem-cu13", "cuda-core"} <= ours.keys()


@pytest.mark.parametrize(
    ("driver", "status"), [((12, 8), FAIL), ((13, 0), WARN), ((13, 1), OK), ((14, 0), OK)], ids=str
)
def test_drivers(driver: tuple[int, int], status: str) -> None:
    (finding,) = versions.check_driver(driver, "13.1")
    assert finding.status == status and bool(finding.fix) == (status != OK)


def test_another_nccl_than_the_installed_one_is_a_warning() -> None:
    assert only(versions.check_nccl((2, 26, 2), "2.28.9"), WARN).measured == "2.26.2"
    assert only(versions.check_nccl((2, 28, 9), "2.28.9"), OK)


@pytest.mark.parametrize("rule", environment.RULES[1:], ids=lambda rule: rule.variable)
def test_a_variable_that_hurts_is_reported_with_the_way_out(rule: environment.Rule) -> None:
    value = "LOC" if rule.variable == "NCCL_P2P_LEVEL" else "1"
    good = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    wrong = only(environment.check_environment(True, {**good, rule.variable: value}), rule.status)
    assert rule.variable in wrong.name and wrong.measured == value and rule.variable in wrong.fix
    assert {f.status for f in environment.check_environment(True, {**good, rule.variable: ""})} == {OK}


def test_megatrons_variable_is_asked_for_on_gpus_only() -> None:
    assert only(environment.check_environment(True, {}), WARN).name == "environment CUDA_DEVICE_MAX_CONNECTIONS"
    assert {f.status for f in environment.check_environment(False, {})} == {OK}


@pytest.mark.parametrize(
    ("there", "cc", "has_headers", "measured"),
    [
        ({"gcc", "clang"}, None, True, "/bin/gcc"),
        ({"clang"}, None, True, "/bin/clang"),
        ({"icx", "gcc"}, "icx", True, "/bin/icx"),
        ({"gcc"}, "icx", True, "CC=icx: not found"),
        (set(), None, True, "neither gcc nor clang"),
        ({"gcc"}, None, False, "no Python.h in "),
    ],
)
def test_triton_needs_a_c_compiler_and_the_headers_of_python(
    there: set[str], cc: str | None, has_headers: bool, measured: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    monkeypatch.setattr(toolchain, "_headers", lambda: str(tmp_path))
    if has_headers:
        (tmp_path / "Python.h").touch()
    variables = {} if cc is None else {"CC": cc}
    (finding,) = toolchain.check_toolchain(True, variables)
    assert finding.measured.startswith(measured)
    assert (finding.status, bool(finding.fix)) == ((OK, False) if measured.startswith("/bin") else (WARN, True))
    assert toolchain.check_toolchain(False, variables) == [], "on CPUs no kernel is launched"


def test_headers_are_looked_for_where_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Debian Python's own scheme names a folder under /usr/local."""
    asked = []
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name, scheme: asked.append((name, scheme)) or "there")
    for scheme in ("posix_local", "venv"):
        monkeypatch.setattr(toolchain.sysconfig, "get_default_scheme", lambda scheme=scheme: scheme)
        assert toolchain._headers() == "there"
    assert asked == [("include", "posix_prefix"), ("include", "venv")]


def test_multicast_is_off_in_the_doctors_process_whatever_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WITHOUT_MULTICAST:
        monkeypatch.setenv(name, "something else")
    seen: dict[str, str | None] = {}

    def no_store(limit_s: float) -> Job:
        seen.update({name: os.environ.get(name) for name in WITHOUT_MULTICAST})
        raise RuntimeError("no store")

    monkeypatch.setattr(command, "open_job", no_store)
    assert command.main([]) == 1
    assert seen == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@pytest.mark.parametrize("flagged", ["--json", "--system-json"])
def test_a_file_that_cannot_be_written_is_one_line(
    flagged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the table, which has taken minutes; all ranks end in order."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "write_system", lambda path, *_, **__: path.write_text(""))
    named = str(tmp_path / "file" / "out.json")
    asked = Doctor(json=named) if flagged == "--json" else Doctor(system_json=named)
    assert not command.report(asked, [ok("store", "answers", "")], ["here"])
    said = capsys.readouterr()
    assert said.err.startswith(f"overlap-train doctor: error: {flagged} {named} cannot be written: ")
    assert said.err.count("\n") == 1 and "store" in said.out
    assert command.report(Doctor(json=str(tmp_path / "out.json")), [ok("store", "answers", "")], ["here"])


@pytest.mark.parametrize(("name", "status"), [("/proc/out.json", 2), ("", 0)])
def test_a_file_that_cannot_be_written_is_no_success(monkeypatch: pytest.MonkeyPatch, name: str, status: int) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what the doctor sets is of this test
    monkeypatch.setattr(command, "Examination", lambda asked, variables, job: mock.Mock())
    assert command.main(["--json", name] if name else []) == status


def test_the_rank_that_prints_leaves_when_all_others_know() -> None:
    """Under srun it serves the store: a rank that is still asking for findings would fail."""
    store = dist.HashStore()
    speaker, other = Job(store, rank=0, size=2), Job(store, rank=1, size=2)
    speaker.post("reported", True)
    leaving = threading.Thread(target=speaker.wait_for_report, args=(0,), daemon=True)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    other.wait_for_report(speaker=0)
    leaving.join(5.0)
    assert not leaving.is_alive()


def examination(job: Job) -> Examination:
    return Examination(Doctor(), {"RANK": "0"}, job)


def test_ranks_with_and_without_a_gpu_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would start NCCL and gloo and wait for each other."""
    job = Job(dist.HashStore(), rank=0, size=1)
    monkeypatch.setattr(job, "run", lambda name, work, limit_s, fix: ran.append(name) or [])
    job.findings = [ok("device", text) for text in ("GPU ranks", "CPU ranks: gloo and shared memory")]
    job.findings = [replace(found, rank=rank, host="node7") for rank, found in enumerate(job.findings)]
    ran: list[str] = []
    examination(job).run()
    strange, unchecked = job.findings[2:]
    assert (strange.name, strange.status, strange.rank) == ("device: ranks differ", FAIL, 1) and strange.host == "node7"
    assert unchecked.name == "not checked" and "join" not in ran and "gpus" in ran
    job.findings, ran = job.findings[1:2], []
    examination(job).run()
    assert "join" in ran and job.findings[1:] == []


class GoneStore:
    """The store of a rank that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_left_with_the_rank_that_printed_is_no_error() -> None:
    """Under srun rank 0 serves it; a rank that fails there would make the job fail."""
    Job(GoneStore(), rank=1, size=2).wait_for_report(speaker=0)  # type: ignore[arg-type]
