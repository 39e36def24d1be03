"""The launcher of user scripts, its parts: command line, import path, hooks into the layouts of Megatron-LM that it knows."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.packed_seq_params import PackedSeqParams

import overlap_train.integrations.megatron as integration
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enabling, graphing
from overlap_train.integrations.megatron import launcher as script
from overlap_train.integrations.megatron.attention import UlyssesSelfAttention
from overlap_train.integrations.megatron.hooks import ScriptHooks
from overlap_train.integrations.megatron.linears import LinearOverlap
from overlap_train.integrations.megatron.packed import cut_of
from tests.script_server import ScriptServer

OVERLAP = OverlapConfig(method="chunked")
TRAINING = "megatron.training.training"


@pytest.fixture
def user_script(tmp_path: Path) -> Path:
    """A script without Megatron that tells what it sees, with a module beside it."""
    (tmp_path / "beside.py").write_text("HERE = True\n")
    text = "import sys, beside\nprint('NAME', __name__, 'ARGV', sys.argv[1:], 'PATH', sys.path[0], 'FILE', __file__)\n"
    (tmp_path / "user.py").write_text(text)
    return tmp_path / "user.py"


LAUNCHER = ("-m", "overlap_train.integrations.megatron")


def test_a_script_sees_what_it_would_see_without_us(user_script: Path, tmp_path: Path, script_server: ScriptServer):
    status, said = script_server.run(*LAUNCHER, str(user_script), *["--lr", "1", "--", "-x"], folder=tmp_path, world=1)
    folder = user_script.resolve().parent
    expected = f"NAME __main__ ARGV ['--lr', '1', '--', '-x'] PATH {folder} FILE {user_script}\n"
    assert status == 0 and said == expected


def test_only_rank_0_prints_the_help(tmp_path: Path, script_server: ScriptServer):
    status, said = script_server.run(*LAUNCHER, "--help", folder=tmp_path)
    assert status == 0 and said.count("usage: ") == 1 and "--overlap-train-method" in said


def test_a_script_that_builds_no_model_with_megatron_is_told_so_at_its_end(
    user_script: Path, tmp_path: Path, script_server: ScriptServer
):
    status, said = script_server.run(*LAUNCHER, str(user_script), "--overlap-train", folder=tmp_path, world=1)
    assert status == 1 and "no model was built by megatron.training's setup_model_and_optimizer" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--overlap-train-method", "chunked"], "--overlap-train-method given without --overlap-train"),
        (["--overlap-train", "--overlap-train-method", "fast"], "invalid choice: 'fast'"),
        (["--overlap-train", "--overlap-train-slots", "qkv,mlp"], "'mlp' is not one of"),
        (["--overlap-train", "--overlap-train-timeout-s", "0"], "timeout_s=0.0 must be a positive"),
        (
            ["--overlap-train", "--overlap-train-methods=fused"],
            "methods is no .* did you mean --overlap-train-method[?]",
        ),
        (["--overlap_train"], "--overlap_train is no .* did you mean --overlap-train[?]"),
        (["--overlap_train_tune_steps=9"], "tune_steps is no .* did you mean --overlap-train-tune-steps[?]"),
        (["--overlap-train", "--overlap-train-xyzzy", "0"], "--overlap-train-xyzzy is no flag of overlap_train [(]"),
    ],
)
def test_wrong_flags_are_refused_before_the_script_runs(user_script: Path, flags: list[str], message: str):
    with pytest.raises(script.CommandError, match=message):
        script.parse([str(user_script), *flags])


def test_a_refusal_is_one_line_of_rank_0(
    user_script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert script.main([str(user_script), "--overlap-train", "--overlap-train-timeout-s", "-1"]) == 2
        said = capsys.readouterr().err
        assert said.count("overlap_train: error: timeout_s=-1") == said.count("\n") == lines


def test_a_command_without_a_script_is_refused():
    for words, message in (([], "no script given"), (["--lr"], "--lr stands where"), (["no.py"], "no such file")):
        with pytest.raises(script.CommandError, match=message):
            script.parse(words)


MISSING = "Megatron-Core is not installed in this environment: pip install 'megatron-core>=0.16,<0.20' psutil"


@pytest.mark.parametrize("missing", ["megatron", "megatron.core", "another_package"])
def test_a_missing_megatron_is_one_line_with_the_way_to_install_it(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script_file = tmp_path / "user.py"
    script_file.write_text(f"import {missing}\n")
    # This process keeps its Megatron.
    monkeypatch.setattr(script, "after_import", lambda actions: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "another_package":
        with pytest.raises(ModuleNotFoundError, match=missing):
            script.main([str(script_file)])
        return
    assert script.main([str(script_file), "--overlap-train"]) == 2
    errors = capsys.readouterr().err
    assert errors == f"overlap_train: error: {MISSING}\n"


def test_every_public_name_is_found():
    assert all(getattr(integration, name) is not None for name in integration.__all__)
    with pytest.raises(AttributeError, match="no attribute 'announce'"):
        integration.announce  # noqa: B018


def test_flags_become_the_config(user_script: Path):
    words = [str(user_script), "--seq-length", "8", "--overlap-train", "--overlap-train-slots", "fc1,fc2", "--bf16"]
    command = script.parse(words)
    assert command.overlap == OverlapConfig(slots=("fc1", "fc2"))
    assert command.arguments == tuple(words[1:])
    assert script.parse([str(user_script), "--seq-length", "8"]).overlap is None


def layout_of(setup: Callable[..., Any]) -> ModuleType:
    """A megatron.training.training with these functions, unhooked."""
    module = ModuleType(TRAINING)
    module.setup_model_and_optimizer = setup
    module.training_log = lambda loss_dict, iteration: "logged"
    return module


def hooked(setup: Callable[..., Any]) -> ModuleType:
    """A megatron.training.training of which the launcher has hold."""
    module = layout_of(setup)
    ScriptHooks(OVERLAP).by_module()[TRAINING](module)
    return module


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, OverlapConfig | None]]:
    """(number of chunks, config) of each call of enable()."""
    calls: list[tuple[int, OverlapConfig | None]] = []
    monkeypatch.setattr(enabling, "enable", lambda chunks, config: calls.append((len(chunks), config)))
    return calls


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Megatron's get_args() returns."""
    args = SimpleNamespace(
        virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_size=1, sequence_parallel=True, spec=None,
        tensorboard_log_interval=1,
    )  # fmt: skip
    variables = ModuleType("megatron.training.global_vars")
    variables.get_args = lambda: args
    variables.get_tensorboard_writer = variables.get_wandb_writer = lambda: None
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    return args


def setup_of_016(model_provider_func: Any, model_type: Any, checkpointing_context: Any = None) -> Any:
    return [model_provider_func(pre_process=True, post_process=True)], None, None


def setup_of_019(model_type: Any, model_provider_func: Any = None, checkpointing_context: Any = None, *, cfg_container: Any = None) -> Any:  # fmt: skip # noqa: E501
    model = cfg_container and cfg_container.model
    if model is None:
        return setup_of_016(model_provider_func, model_type)
    chunks = [torch.nn.Identity(), torch.nn.Identity()]
    for hook in model.pre_wrap_hooks:
        chunks = hook(chunks)
    return chunks, None, None


def test_a_model_provider_is_followed_by_enable(enabled: list[Any], arguments: SimpleNamespace):
    for setup, call in (
        (setup_of_016, lambda f: f(lambda **stage: torch.nn.Identity(), "gpt", checkpointing_context={})),
        (setup_of_019, lambda f: f("gpt", model_provider_func=lambda **stage: torch.nn.Identity())),
    ):
        module = hooked(setup)
        assert len(call(module.setup_model_and_optimizer)) == 3
        assert module.training_log({}, 1) == "logged"
    assert enabled == [(1, OVERLAP)] * 2
    arguments.virtual_pipeline_model_parallel_size, arguments.pipeline_model_parallel_size = 3, 2
    chunked = hooked(lambda model_provider_func: [model_provider_func(vp_stage=stage) for stage in range(3)])
    chunked.setup_model_and_optimizer(lambda vp_stage: torch.nn.Identity())
    assert enabled[2:] == [(3, OVERLAP)], "chunks of a virtual pipeline are enabled together"


def test_a_model_config_gets_one_pre_wrap_hook(enabled: list[Any], arguments: SimpleNamespace):
    module, container = hooked(setup_of_019), SimpleNamespace(model=SimpleNamespace(pre_wrap_hooks=[]))
    module.setup_model_and_optimizer("gpt", cfg_container=container)
    assert enabled == [(2, OVERLAP)]
    container.model.pre_wrap_hooks[0]([torch.nn.Identity()])  # the same config builds another model
    assert len(enabled) == 1


def attention_of_script(arguments: SimpleNamespace, masks_documents: bool | None, is_sft: bool | None = False) -> Any:
    """A Ulysses attention within the model that a script builds. None: Megatron-Core 0.16 has neither argument."""
    if masks_documents is not None:
        arguments.dataloader_inter_document_masking, arguments.sft = masks_documents, is_sft
    attention: Any = UlyssesSelfAttention.__new__(UlyssesSelfAttention)
    torch.nn.Module.__init__(attention)
    attention.config, other = SimpleNamespace(), torch.nn.Identity()
    other.config = None  # type: ignore[assignment] # whatever a module calls so
    module = hooked(setup_of_016)
    module.setup_model_and_optimizer(lambda **stage: torch.nn.Sequential(other, attention), "gpt")
    return attention


@pytest.mark.parametrize(
    ("masks_documents", "is_sft", "cut"),
    [(True, False, "zigzag_pack"), (True, True, "zigzag"), (False, False, "zigzag"), (None, None, "zigzag")],
)
def test_packs_are_taken_as_the_scripts_loader_cuts_them(
    enabled: list[Any], arguments: SimpleNamespace, masks_documents: bool | None, is_sft: bool | None, cut: str
):
    config = attention_of_script(arguments, masks_documents, is_sft).config
    pack: Any = SimpleNamespace()
    assert cut_of(pack, config) == cut and cut_of(None, config) == "zigzag"
    pack.cp_partition_mode = "contiguous"
    assert cut_of(pack, config) == "contiguous", "what a pack says counts"


def test_packs_that_say_how_they_are_cut_are_refused_with_a_loader_that_cuts_otherwise(
    enabled: list[Any], arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    """Newer copies of Megatron-LM have the field, "zigzag" by default, and differ in what this loader does then."""
    monkeypatch.setattr(PackedSeqParams, "cp_partition_mode", "zigzag", raising=False)
    attention_of_script(arguments, masks_documents=False)
    with pytest.raises(RuntimeError, match="--dataloader-inter-document-masking: how this Megatron cuts such packs"):
        attention_of_script(arguments, masks_documents=True)


@pytest.mark.parametrize(
    ("setup", "call", "message"),
    [
        (setup_of_019, {"model_type": 0}, "no argument model_provider_func or cfg_container.model"),
        (
            setup_of_019,
            {"model_type": 0, "cfg_container": SimpleNamespace(model=SimpleNamespace())},
            "SimpleNamespace has no pre_wrap_hooks",
        ),
        (lambda model_provider_func: None, {"model_provider_func": len}, "in a way that overlap_train does not know"),
    ],
)
def test_a_build_that_is_not_known_is_an_error(
    enabled: list[Any], arguments: SimpleNamespace, setup: Any, call: dict[str, Any], message: str
):
    module = hooked(setup)
    with pytest.raises(RuntimeError, match=message):
        module.setup_model_and_optimizer(**call)
    with pytest.raises(RuntimeError, match="training has begun, and no model was built"):
        module.training_log({}, 1)


@pytest.mark.parametrize("missing", ["setup_model_and_optimizer", "training_log"])
def test_a_hook_without_its_place_is_an_error_at_import(missing: str):
    module = layout_of(setup_of_016)
    delattr(module, missing)
    with pytest.raises(RuntimeError, match=f"this Megatron's {TRAINING} has no {missing}.*core_v0.16 to 0.20-dev"):
        ScriptHooks(OVERLAP).by_module()[TRAINING](module)


def test_without_our_flag_the_training_module_is_left_alone_and_the_parser_knows_the_flags():
    hooks = ScriptHooks(None)
    assert TRAINING not in hooks.by_module()
    module = ModuleType("megatron.training.arguments")
    module.add_megatron_arguments = lambda parser: parser
    hooks.by_module()[module.__name__](module)
    parser = module.add_megatron_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--overlap-train"]).overlap_train
    hooks.finish()  # nothing was asked for, so nothing is missing


FULL = "megatron.core.full_cuda_graph"


def test_megatrons_graph_wrapper_brackets_what_it_captures_and_its_graphs_are_released(
    enabled: list[Any], arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    """Each group whose linears overlap is bracketed once, in validation, too; passes that are not captured are left alone."""
    events: list[str] = []

    @contextlib.contextmanager
    def graphed(group: str) -> Iterator[None]:
        events.append(f"begin {group}")
        yield
        events.append(f"end {group}")

    def linear(group: str, calls: int) -> torch.nn.Module:
        module = torch.nn.Linear(1, 1)
        module.tp_group, module.config = group, None  # type: ignore[assignment]
        module.overlap = LinearOverlap(OverlapConfig(), "fc1", "fc1", overlapped_calls=calls)  # type: ignore[assignment]
        return module

    monkeypatch.setattr(graphing, "graphed", graphed)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    model = torch.nn.ModuleDict(
        {"linear_qkv": linear("tp", 2), "linear_fc1": linear("tp", 1), "output_layer": linear("last", 1)}
    )
    module, hooks = ModuleType(FULL), ScriptHooks(OVERLAP)
    module.FullCudaGraphWrapper = FullCudaGraphWrapper
    hooks.by_module()[FULL](module)
    wrapper = module.FullCudaGraphWrapper(lambda **kwargs: events.append("passes"), cuda_graph_warmup_steps=2)
    assert isinstance(wrapper, FullCudaGraphWrapper) and wrapper.cuda_graph_warmup_steps == 2
    for is_captured, forward_only in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_captured: answer)
        wrapper.forward_backward_func(model=[model], forward_only=forward_only)
    assert events == ["begin tp", "begin last", "passes", "end last", "end tp"] * 2 + ["passes"]
    with graphing.graphed_model(linear("tp", 0)):
        assert len(events) == 11, "a model that has not overlapped has no barriers"
    resets: list[str] = []
    graph = SimpleNamespace(reset=lambda: resets.append("training"))
    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", {"training": graph, "validation": None})
    training = layout_of(setup_of_016)
    hooks.by_module()[TRAINING](training)
    training.setup_model_and_optimizer(lambda **stage: torch.nn.Identity(), "gpt")
    hooks.finish()
    hooks.finish()
    assert resets == ["training"] and not any(FullCudaGraphWrapper.cuda_graph.values()), "NCCL would wait for them"
