"""tune_steps: methods take turns in a linear's first calls, ranks agree on the fastest, and it is kept."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.registry import made_domain
from overlap_train.ops import plan_cache as in_trial
from overlap_train.ops import plan_cache as plan_book
from overlap_train.ops import plan_cache as trial_book
from overlap_train.ops import plan_cache as tuning_file
from overlap_train.ops.plan_cache import plan_of
from overlap_train.ops.spec import ALL_GATHER_LINEAR
from overlap_train.schedule.order import GATHER
from overlap_train.select import autotune, choose
from overlap_train.select.choose import Choice
from overlap_train.select.method import NAMES, Method
from overlap_train.select.passes import SCATTER_AND_WGRAD
from overlap_train.select.table import key_of, read
from tests.processes import run_ranks, values

STEPS, M, N, K = 12, 16, 6, 4  # global sizes
SLOW_S = 0.02


def _step(config: OverlapConfig, name: str, rows: int = M, row_linear: bool = False) -> None:
    """One call with integers, forward and backward, compared with one rank's."""
    world, rank, operator = (
        dist.get_world_size(),
        dist.get_rank(),
        linear_reduce_scatter if row_linear else all_gather_linear,
    )
    generator = torch.Generator().manual_seed(rows)
    x, w = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((rows, K), (N, K)))
    dims = (1, 1, 0) if row_linear else (0, 0, 1)  # in which x, w and y are sharded
    own_x, own_w = (t.chunk(world, dim)[rank].clone().requires_grad_() for t, dim in zip((x, w), dims[:2], strict=True))
    y = operator(own_x, own_w, group=dist.group.WORLD, config=config, name=name)
    y.sum().backward()
    assert torch.equal(y, (x @ w.t()).chunk(world, dims[2])[rank])
    assert torch.equal(own_x.grad, (torch.ones(rows, N) @ w).chunk(world, dims[0])[rank])
    assert torch.equal(own_w.grad, (torch.ones(N, rows) @ x).chunk(world, dims[1])[rank])


def _two_methods() -> Any:
    """Those that CPU processes have without Triton's interpreter, whose methods are never fast."""
    return mock.patch.object(trial_book, "methods_to_try", return_value=("chunked", "collective"))


@contextlib.contextmanager
def _slow(ranks: tuple[int, ...], *passes: tuple[str, str]) -> Any:
    """On these ranks, (pass of a tag, method) takes SLOW_S longer."""
    enter = autotune.TimedBracket.__enter__

    def slowly(bracket: Any) -> None:
        enter(bracket)
        if dist.get_rank() in ranks and (bracket._timed.kind, bracket._timed.method) in passes:
            time.sleep(SLOW_S)

    with mock.patch.object(autotune.TimedBracket, "__enter__", slowly):
        yield


def _methods(domain: OverlapDomain) -> list[tuple[str, str]]:
    """Of all plans: forward's and backward's."""
    entries = [domain.book.plans.get(key) for key in list(domain.book.plans)]
    return [(p.plan.fprop.method, p.plan.dgrad.method) for entry in entries for p in entry.values()]


def _trial(rank: int, world: int, folder: str) -> dict[str, Any]:
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder, timeout_s=20.0)
    ran: list[str] = []
    next_turn = autotune.Autotune.next_turn

    def turn(trial: autotune.Autotune, name: str) -> int | None:
        number = next_turn(trial, name)
        ran.append(f"{name} {'untuned' if number is None else trial.methods[number]}")
        return number

    facts: dict[str, Any] = {}
    said = io.StringIO()
    # chunked is slow forward on one rank, collective backward on the other
    with (
        _two_methods(),
        mock.patch.object(autotune.Autotune, "next_turn", turn),
        _slow((0,), (GATHER, "chunked")),
        _slow((1,), (SCATTER_AND_WGRAD, "collective")),
        mock.patch.object(plan_book, "prepare", side_effect=plan_book.prepare) as prepare,
        mock.patch.object(tuning_file.table, "save", side_effect=tuning_file.table.save) as save,
        contextlib.redirect_stderr(said),
    ):
        for step in range(STEPS):
            _step(config, "layers.0.fc1")
            if step % 2:
                _step(config, "layers.1.fc1")  # of the same sizes: fewer calls, which count for the times only
        facts["agreements in the trial"] = prepare.call_count
        facts["still tries"] = [*ran]
        domain = made_domain(dist.group.WORLD)
        facts["said before"] = said.getvalue()
        _step(config, "layers.0.fc1")  # ends it
        _step(config, "layers.1.fc1")
        _step(config, "layers.2.fc1")  # of the same sizes
        _step(config, "layers.2.fc1", rows=M - 2)  # of the same bucket
    facts["saved"] = save.call_count
    facts["tried after"] = len(ran) - len(facts["still tries"])
    facts["said"] = said.getvalue()
    facts["plans"] = _methods(domain)
    winners = domain.book.table.winners.values()
    facts["winners"] = {winner.measured.kind: (winner.how.name, sorted(map(str, winner.ms))) for winner in winners}
    kept = read(folder, key_of(torch.device("cpu"), world)).winners if rank == 0 else None
    facts["kept"] = kept is None or {winner.measured.kind: winner.how.name for winner in kept.values()}
    return facts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(2, _trial, str(tmp_path_factory.mktemp("tuned"))))


def test_methods_take_turns_in_each_linear(ranks: list[dict[str, Any]]) -> None:
    both = ["untuned", *["chunked", "collective", "collective", "chunked"] * (STEPS // 4)]
    for facts in ranks:
        for name, calls in (("layers.0.fc1", STEPS), ("layers.1.fc1", STEPS // 2)):
            own = [said.split()[1] for said in facts["still tries"] if said.startswith(name)]
            assert own == both[:calls]
        assert facts["tried after"] == 0, "once the first linear has made its calls it is over for all"


def test_all_ranks_take_what_is_fastest_on_the_slowest_rank(ranks: list[dict[str, Any]]) -> None:
    """Each pass of its own; for all linears and lengths of about these sizes."""
    for facts in ranks:
        assert facts["winners"] == {
            GATHER: ("collective", ["chunked", "collective"]),
            SCATTER_AND_WGRAD: ("chunked", ["chunked", "collective"]),
        }
        assert facts["plans"] == [("collective", "chunked")] * 2
        assert facts["agreements in the trial"] == 1, "of two linears"


def test_rank_0_keeps_the_winners_and_says_so(ranks: list[dict[str, Any]]) -> None:
    assert [facts["saved"] for facts in ranks] == [1, 0]
    assert ranks[0]["kept"] == {GATHER: "collective", SCATTER_AND_WGRAD: "chunked"}
    assert [facts["said before"] for facts in ranks] == ["", ""] and ranks[1]["said"] == ""
    first, forward, backward = ranks[0]["said"].splitlines()
    begin = f"overlap_train: layers.0.fc1 and linears of about its sizes (M=16 N=3 K=4), in {STEPS} calls, kept in "
    assert first.startswith(begin)
    assert forward.startswith("  forward collective (collective ") and backward.startswith(
        "  backward chunked (chunked "
    )


def _no_trial(rank: int, world: int, folder: str) -> list[int]:
    """How many calls were tried: where both passes are measured, in evaluation, of a frozen weight; and then
    of a row linear."""
    turns = []
    next_turn = autotune.Autotune.next_turn
    with mock.patch.object(autotune.Autotune, "next_turn", lambda *turn: turns.append(turn) or next_turn(*turn)):
        config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder)
        _step(config, "known")
        x, w = torch.ones(5, K, requires_grad=True), torch.ones(7, K)
        with torch.no_grad():
            all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="evaluated")
        all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="frozen").sum().backward()
        none = len(turns)
        for _ in range(3):
            _step(config, "row", row_linear=True)
    return [none, len(turns)]


def test_what_is_not_tried(ranks: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = max(Path(tmp_path_factory.getbasetemp()).glob("tuned*"))
    assert values(run_ranks(2, _no_trial, str(folder))) == [[0, 3]] * 2


def _other_times(rank: int, world: int, folder: str) -> list[str]:
    """Forward, rank 0 has measured that collective is faster, rank 1 that chunked is, which is slower on the slowest rank."""
    times = ({"chunked": 1.0, "collective": 0.5}, {"chunked": 0.1, "collective": 0.7})[rank]
    measured = {(GATHER, method): ms for method, ms in times.items()}
    with mock.patch.object(autotune.Autotune, "times", return_value=measured), _two_methods():
        for _ in range(STEPS + 1):
            _step(OverlapConfig(tune_steps=STEPS, tuning_dir=folder), "fc1")
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return [winner.how.name for winner in domain.book.table.winners.values()]


def test_ranks_that_measured_other_times_agree(tmp_path: Path) -> None:
    assert values(run_ranks(2, _other_times, str(tmp_path))) == [["collective"]] * 2


def _every_method(rank: int, world: int) -> tuple[int, list[str]]:
    """Exact in each turn, which _step looks at. Of each method two calls count, so its linear makes 16."""
    config, tried = OverlapConfig(tune_steps=STEPS, tuning_dir="/dev/null/none"), set()
    candidate = in_trial.Candidate.linear

    def note(self: in_trial.Candidate, name: str) -> Any:
        tried.add(self.plan.fprop.method)
        return candidate(self, name)

    with warnings.catch_warnings(), mock.patch.object(in_trial.Candidate, "linear", note):
        warnings.simplefilter("ignore")
        for row_linear in (False, True):
            for _ in range(17):
                _step(config, f"row_linear={row_linear}", row_linear=row_linear)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return len(domain.book.table.winners), sorted(tried)


def test_every_method_takes_its_turn_and_is_exact() -> None:
    assert values(run_ranks(2, _every_method)) == [(4, sorted(NAMES))] * 2


def _too_few(rank: int, world: int, folder: str) -> int:
    """How many trials begin in the calls of three, in which nothing was timed."""
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder)
    with (
        mock.patch.object(autotune.Autotune, "times", return_value={}),
        mock.patch.object(
            autotune.Autotune, "__init__", autospec=True, side_effect=autotune.Autotune.__init__
        ) as begun,
        _two_methods(),
    ):
        for _ in range(3 * STEPS):
            _step(config, "fc1")
    return begun.call_count


def test_too_few_calls_to_tell_are_not_repeated(tmp_path: Path) -> None:
    assert values(run_ranks(2, _too_few, str(tmp_path))) == [1, 1]


def _domain() -> OverlapDomain:
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return domain


def _lengths(rank: int, world: int, folder: str) -> list[int]:
    """Each call has another length of one bucket: winners, and calls until there were any."""
    config, calls = OverlapConfig(tune_steps=STEPS, tuning_dir=folder), 0
    with _two_methods():
        for rows in range(130, 190, 2):
            _step(config, "fc1", rows=rows)
            calls += not _domain().book.table.winners
    return [len(_domain().book.table.winners), calls]


def test_every_length_takes_part_and_the_trial_ends(tmp_path: Path) -> None:
    assert values(run_ranks(2, _lengths, str(tmp_path))) == [[2, STEPS]] * 2


def _other_layout(rank: int, world: int, folder: str) -> int:
    """The call that ends the trial has, on rank 0, a weight that lies in memory as none before."""
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder, timeout_s=10.0)
    x, w = torch.ones(M // 2, K, requires_grad=True), torch.ones(N // 2, K, requires_grad=True)
    other = torch.ones(K, N // 2).t().requires_grad_()
    with _two_methods():
        for call in range(STEPS + 2):
            weight = other if rank == 0 and call == STEPS else w
            all_gather_linear(x, weight, group=dist.group.WORLD, config=config, name="fc1").sum().backward()
    return len(_domain().book.table.winners)


def test_a_weight_that_lies_otherwise_when_the_trial_ends(tmp_path: Path) -> None:
    assert values(run_ranks(2, _other_layout, str(tmp_path))) == [2, 2]


def _afterwards(rank: int, world: int, folder: str) -> list[tuple[str, str]]:
    """Methods of all plans after a trial in which collective wins: a call without gradients, before it and after."""
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder)
    x, w = torch.ones(M // 2, K), torch.ones(N // 2, K)
    with _two_methods(), _slow((0, 1), (GATHER, "chunked"), (SCATTER_AND_WGRAD, "chunked")):
        for _ in range(STEPS + 1):
            with torch.no_grad():
                all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1")
            _step(config, "fc1")
        with torch.no_grad():
            all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1")
    return _methods(_domain())


def test_the_winners_are_for_calls_without_gradients_too(tmp_path: Path) -> None:
    """As in recomputation, whose first forward has none."""
    assert values(run_ranks(2, _afterwards, str(tmp_path))) == [[("collective", "collective")] * 2] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_let_backward_miss_no_method(reentrant: bool, tmp_path: Path) -> None:
    assert values(run_ranks(2, _recomputed, reentrant, str(tmp_path))) == [[GATHER, SCATTER_AND_WGRAD]] * 2


def _recomputed(rank: int, world: int, reentrant: bool, folder: str) -> list[str]:
    """Kinds that have a winner."""
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder)
    x, w = torch.ones(M // 2, K, requires_grad=True), torch.ones(N // 2, K, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1")

    with _two_methods():
        for _ in range(STEPS + 1):
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    return sorted(winner.measured.kind for winner in _domain().book.table.winners.values())


def _refused(rank: int, world: int, folder: str, mib: int) -> list[tuple[str, ...]]:
    """Which methods are tried in so much memory, and where the kernels refuse one."""
    tried = []
    begin = autotune.Autotune.__init__

    def note(trial: autotune.Autotune, fprop: Any, methods: tuple[str, ...], *rest: Any) -> None:
        tried.append(tuple(sorted(methods)))
        begin(trial, fprop, methods, *rest)

    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder, symmetric_mib=mib)
    with mock.patch.object(autotune.Autotune, "__init__", note):
        x, w = torch.ones(256, 2048, requires_grad=True), torch.ones(8, 2048, requires_grad=True)  # 4 MiB a slot
        all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1").sum().backward()
        with mock.patch.object(
            trial_book, "why_not_here", lambda plan, *_: "no" if plan.fprop.method == "fused" else None
        ):
            _step(config, "fc2")
    return tried


@pytest.mark.parametrize(("mib", "fits"), [(20, False), (30, False), (40, True)])
def test_what_does_not_fit_takes_no_part(mib: int, fits: bool, tmp_path: Path) -> None:
    """Three slots of 4 MiB, and as many of words with flags, which are twice as large: 12 MiB, and 24 more."""
    every = set(NAMES)
    expected = [tuple(sorted(every if fits else every - {"low_latency"})), tuple(sorted(every - {"fused"}))]
    assert values(run_ranks(2, _refused, str(tmp_path), mib)) == [expected] * 2


def _other_steps(rank: int, world: int, folder: str) -> str:
    config = OverlapConfig(tune_steps=STEPS + rank, tuning_dir=folder)
    with pytest.raises(ValueError, match="all ranks of a group must call the same operator") as caught:
        _step(config, "fc1")
    return str(caught.value)


def test_ranks_compare_their_steps(tmp_path: Path) -> None:
    for message in values(run_ranks(2, _other_steps, str(tmp_path))):
        assert f"in {STEPS} calls" in message and f"in {STEPS + 1} calls" in message


def _within(rank: int, world: int, folder: str) -> list[bool]:
    """Whether a plan that is asked for without turns is in a trial, and one of linear.py of the same sizes."""
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder)
    x, w = torch.ones(4, K, requires_grad=True), torch.ones(N, K, requires_grad=True)
    operands = (ALL_GATHER_LINEAR, x, w, None, dist.group.WORLD, config, "qkv")
    return [isinstance(plan_of(*operands, tries=tries), in_trial.InRun) for tries in (False, True)]


def test_who_takes_no_turns_takes_no_part(tmp_path: Path) -> None:
    """As the products of TP x Ulysses, whose trial would never end."""
    assert values(run_ranks(2, _within, str(tmp_path))) == [[False, True]] * 2


def _not_writable(rank: int, world: int) -> list[str]:
    config = OverlapConfig(tune_steps=STEPS, tuning_dir="/dev/null/none")
    with pytest.warns(UserWarning, match="cannot be written") if rank == 0 else contextlib.nullcontext():
        for _ in range(17):
            _step(config, "fc1")
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return sorted(winner.measured.kind for winner in domain.book.table.winners.values())


def test_a_folder_that_cannot_be_written_is_a_warning() -> None:
    assert values(run_ranks(2, _not_writable)) == [[GATHER, SCATTER_AND_WGRAD]] * 2


@pytest.mark.parametrize("steps", [-1, 1, 9, 12.0, True])
def test_too_few_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"tune_steps=.* at least 10.*--overlap-train-tune-steps"):
        OverlapConfig(tune_steps=steps)


def _differs(rank: int, world: int, folder: str, how: str) -> tuple[str, str]:
    """Rank 1 has other arguments in a first call whose trial connects the nodes, which the untuned plan would not need."""
    short = mock.patch.object(choose, "untuned", return_value=Choice(Method("collective"), "a short block"))
    steps = 0 if how == "steps" and rank else 20
    config = OverlapConfig(node_ranks=1, timeout_s=5.0, tune_steps=steps, tuning_dir=folder)
    x, w = torch.ones(8, 16, requires_grad=True), torch.ones(8, 16, requires_grad=how != "frozen" or rank == 0)
    bias = torch.ones(9 if how == "bias" and rank else 8)

    def connect(domain: OverlapDomain, config: OverlapConfig) -> OverlapConfig:
        domain.agreement.barrier("connect the nodes")
        return config

    with short, mock.patch.object(OverlapDomain, "settled", connect):
        try:
            all_gather_linear(x, w, bias, group=dist.group.WORLD, config=config, name="fc1")
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("how", ["frozen", "steps", "bias"])
def test_ranks_agree_before_a_trial_connects_their_nodes(how: str, tmp_path: Path) -> None:
    """Else some would connect, and hear no more than that others do not."""
    for kind, text in values(run_ranks(2, _differs, str(tmp_path), how, limit_s=60)):
        assert kind == "ValueError" and text.startswith("fc1"), text
