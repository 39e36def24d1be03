"""Faults between nodes that the doctor must find, and faults of how it looks for them."""

from __future__ import annotations

from tests.mutations.mutation import In

DOCTOR = "tests/protocol/test_doctor_network.py"
WHOLE = (f"{DOCTOR}::test_pieces_are_whole_when_their_signals_are_there",)
GLOO = In("overlap_train/symmetric/inter_node.py", WHOLE)
NETWORK = In("overlap_train/tools/doctor/network.py", (DOCTOR,))
COMMAND = In("overlap_train/tools/doctor/command.py", (DOCTOR,))

_DATA = """                if nbytes:
                    self._group.recv([heap[data : data + nbytes]], node, _DATA).wait(_FOREVER)
"""
_WORD = "                heap[signal : signal + 8].view(torch.int64)[0] = word\n"

FAULTS = [
    GLOO("the doctor finds a word that is stored before its data", _DATA + _WORD, _WORD + _DATA),
    GLOO("the doctor finds data that nobody waits for", "node, _DATA).wait(_FOREVER)", "node, _DATA)"),
    NETWORK("rounds have the same numbers", "37 * source + 101 * turn", "37 * source",
            f"{DOCTOR}::test_every_round_has_other_numbers_everywhere"),
    NETWORK("ranks have the same numbers", "37 * source + 101 * turn", "101 * turn",
            f"{DOCTOR}::test_every_round_has_other_numbers_everywhere"),
    NETWORK("nobody looks at the pieces", "self.counts += self.gathers.broken(turn).sum(dim=1)", "self.gathers.broken(turn)"),
    NETWORK("only this rank's pieces end the trial", "if here.any(bool(trial.counts.any())):", "if bool(trial.counts.any()):"),
    NETWORK("nodes that cannot be formed are one node", "if domain.nodes.problem is not None:", "if False:"),
    NETWORK("pieces inside the node are counted", "self.topology.world - self.topology.local) *", "self.topology.world - 1) *",
            f"{DOCTOR}::test_what_comes_from_other_nodes_is_counted"),
    COMMAND("the speed between ranks of one machine is kept", "plays_nodes=asked.node_ranks > 0", "plays_nodes=False",
            "tests/unit/test_plan_inputs.py::test_what_node_ranks_plays_is_no_network"),
    COMMAND("what --node-ranks says is not used", "self._all, self._asked.node_ranks,", "self._all, 0,"),
]  # fmt: skip
