"""Faults between nodes that the doctor must find, and faults of how it looks for them."""

from __future__ import annotations

from tests.mutations.mutation import In

DOCTOR = "tests/protocol/test_doctor_network.py"
WHOLE = (f"{DOCTOR}::test_pieces_are_whole_when_their_signals_are_there",)
GLOO = In("overlap_train/symmetric/gloo.py", WHOLE)
TRANSPORTS = "tests/unit/test_doctor_transports.py"
GATHERS = In("overlap_train/tools/doctor/gathers.py", (DOCTOR,))
NETWORK = In("overlap_train/tools/doctor/network.py", (DOCTOR,))
LINES = In("overlap_train/tools/doctor/network.py", (TRANSPORTS,))
COMMAND = In("overlap_train/tools/doctor/command.py", (TRANSPORTS,))
EXAMINATION = In("overlap_train/tools/doctor/examination.py", (TRANSPORTS,))
TIMES = In("overlap_train/tools/doctor/operator.py", ("tests/unit/test_doctor_hardware.py",))

_DATA = """                if nbytes:
                    self._group.recv([heap[data : data + nbytes]], node, _DATA).wait(_FOREVER)
"""
_WORD = "                heap[signal : signal + 8].view(torch.int64)[0] = word\n"

FAULTS = [
    GLOO("the doctor finds a word that is stored before its data", _DATA + _WORD, _WORD + _DATA),
    GLOO("the doctor finds data that nobody waits for", "node, _DATA).wait(_FOREVER)", "node, _DATA)"),
    GATHERS("rounds have the same numbers", "37 * source + 101 * turn", "37 * source",
            f"{DOCTOR}::test_every_round_has_other_numbers_everywhere"),
    GATHERS("ranks have the same numbers", "37 * source + 101 * turn", "101 * turn",
            f"{DOCTOR}::test_every_round_has_other_numbers_everywhere"),
    GATHERS("nobody looks at the pieces", "self.counts += self.gathers.broken(turn).sum(dim=1)", "self.gathers.broken(turn)"),
    NETWORK("only this rank's pieces end the trial", "if here.any(bool(trial.counts.any())):", "if bool(trial.counts.any()):"),
    NETWORK("nodes that cannot be formed are one node", "if domain.nodes.problem is not None:", "if False:"),
    GATHERS("pieces inside the node are counted", "self.topology.world - self.topology.local) *", "self.topology.world - 1) *",
            f"{DOCTOR}::test_what_comes_from_other_nodes_is_counted"),
    EXAMINATION("what --node-ranks says is not used", "network.Settings(asked.node_ranks,", "network.Settings(0,", DOCTOR),
    EXAMINATION("what --network says is not used", "asked.network, seconds,", '"auto", seconds,', DOCTOR),
    EXAMINATION("transports follow each other in one world of NVSHMEM", 'self._check(f"before {name}", free)', "pass"),
    EXAMINATION("ranks with and without a GPU join", "if strange or not self._can_join():", "if not self._can_join():",
                "tests/unit/test_doctor_installation.py::test_ranks_with_and_without_a_gpu_do_not_join"),
    EXAMINATION("ranks that are alike are strangers", "for finding in devices}) <= 1:", "for finding in devices}) < 1:",
                "tests/unit/test_doctor_installation.py::test_ranks_with_and_without_a_gpu_do_not_join"),
    COMMAND("NCCL finds its own way between pretended nodes", "    if asked.node_ranks:\n", "    if False:\n"),
    LINES("NVSHMEM is checked only when it is asked for", "return (NCCL, NVSHMEM) if on_gpu", "return (NCCL,) if on_gpu"),
    LINES("another transport is checked than was asked for", 'if self.network != "auto":', "if False:"),
    LINES("groups are not told the transport", '"auto" if transport == GLOO else transport', '"auto"'),
    LINES("NVSHMEM sends from other memory", "NVSHMEM if transport == NVSHMEM else self.provider", "self.provider"),
    LINES("CPU processes try what joins GPUs", 'if here.device.type != "cuda":', "if False:"),
    LINES("a library that is missing leaves peers in a rendezvous", "_LIBRARIES.get(transport, ())", "()"),
    LINES("a provider without NVSHMEM's memory is not looked at", 'provider not in ("auto", NVSHMEM)', "False"),
    LINES("a job is not fit without NVSHMEM", "if error is not None and not needed:", "if False:"),
    LINES("a transport that was asked for may fail", "transport in (GLOO, NCCL, self.network)", "transport in (GLOO, NCCL)"),
    LINES("ranks that lack nothing have a line, too", "return [] if error == _ELSEWHERE else [finding]", "return [finding]"),
    TIMES("NCCL over sockets judges the operators", "    if pretends():\n", "    if False:\n"),
    TIMES("a single rank is timed", "found if here.size == 1 else ", "",
          "tests/protocol/test_doctor_processes.py::test_a_single_process_without_gpu_says_what_it_cannot_check"),
    COMMAND("the speed between ranks of one machine is kept", "plays_nodes=asked.node_ranks > 0", "plays_nodes=False",
             "tests/unit/test_plan_inputs.py::test_what_node_ranks_plays_is_no_network"),
]  # fmt: skip
