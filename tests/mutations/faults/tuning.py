"""Faults of what is measured across nodes: whose measurements they are, and into how many chunks blocks are cut."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT = "tests/unit/test_tuning_nodes.py"
PROCESSES = "tests/protocol/test_tuning_nodes.py"
IN_CHUNKS = ("tests/protocol/test_nodes.py::test_every_shape_in_chunks",)
CHOICE = In("overlap_train/planning/choice.py", (UNIT,))
TABLE = In("overlap_train/planning/table.py", (UNIT,))
KEY = In("overlap_train/planning/table_key.py", (UNIT,))
PLAN = In("overlap_train/planning/engine_plan.py", (UNIT,))
TILING = In("overlap_train/planning/tiling.py", (UNIT,))
CANDIDATES = In("overlap_train/tools/tune/candidates.py", (UNIT,))
COMMAND = In("overlap_train/tools/tune/command.py", (PROCESSES,))
FILE = In("overlap_train/operators/tuning_file.py", (PROCESSES,))
ENGINES = In("overlap_train/operators/node_processes.py", IN_CHUNKS)

FAULTS = [
    CHOICE("a row of another number of nodes is taken",
           "table.find(pass_) if table.nodes == nodes else None", "table.find(pass_)"),
    CHOICE("a measured number of chunks is not taken", "        return measured or PLAIN\n", "        return PLAIN\n"),
    KEY("the number of nodes is not in a file",
        "if name not in LEFT_OUT or value != LEFT_OUT[name]}", "if name not in LEFT_OUT}"),
    KEY("files from before nodes were counted are another's", "if name not in LEFT_OUT or value != LEFT_OUT[name]}", "}"),
    TABLE("files from before nodes were counted cannot be read", 'LEFT_OUT | document["key"]', 'document["key"]'),
    KEY("a schedule across nodes counts inside one", "CROSSINGS if nodes > 1 else 0", "CROSSINGS"),
    KEY("a schedule across nodes does not count", "CROSSINGS if nodes > 1 else 0", "0"),
    KEY("what was measured in one hardware queue counts for many", '== "1" else "many"', '== "1" else "one"'),
    KEY("hardware queues count inside a node", 'if nodes == 1 or device.type != "cuda":', 'if device.type != "cuda":'),
    KEY("hardware queues count for CPU processes", 'if nodes == 1 or device.type != "cuda":', "if nodes == 1:"),
    KEY("what NCCL has carried counts for NVSHMEM", 'network="nvshmem" if network == "nvshmem" else "nccl"', 'network="nccl"'),
    FILE("a trial is kept whatever carries data between nodes",
         ", domain.config.network)", ")", "tests/unit/test_tuning_nodes.py"),
    TABLE("a table does not say how many nodes it is of",
          "return Table({winner.measured.bucket: winner for winner in winners}, key.nodes)",
          "return Table({winner.measured.bucket: winner for winner in winners})", PROCESSES),
    TABLE("what cannot be read is replaced", "    except FileNotFoundError:\n        there", "    except OSError:\n        there",
          "tests/unit/test_tuning_table.py"),
    TABLE("without a home folder a folder called ~ is made", 'if found.startswith("~"):', "if False:",
          "tests/unit/test_tuning_table.py"),
    PLAN("a number of chunks is ignored", "    if choice.variant.chunks:\n", "    if False:\n"),
    TILING("rows are cut into unequal chunks", "if count <= most and m_shard % count == 0)", "if count <= most)"),
    CANDIDATES("methods that stay in a node are measured across",
               "may_choose(method, nodes)", "may_choose(method, 1)"),
    CANDIDATES("an all-to-all is measured in chunks", "pass_.kind in EXCHANGES and device", "False and device"),
    CANDIDATES("one number of chunks is measured twice", "if v.chunks != own)", "if v.chunks)"),
    CANDIDATES("chunks are too short for a message", '// SHORTEST_MESSAGE if device.type == "cuda"', 'if device.type == "cuda"'),
    COMMAND("a folder that training does not know is not told",
            "[] if folder == OverlapConfig().tuning_dir else", "[] if True else", "tests/unit/test_tuning_command.py"),
    COMMAND("what is measured across nodes is stored as of one",
            "key_of(here.device, here.size, nodes, asked.network)", "key_of(here.device, here.size)"),
    FILE("a group across nodes reads what one node has measured",
         "domain.world_size, domain.topology.nodes, domain.config.network)", "domain.world_size)"),
    ENGINES("a chunk of a far block is multiplied before it is there",
            "rows = call.wait_chunks(source, chunks)", "rows = call.chunk_rows(chunks[0], len(chunks))"),
    ENGINES("every chunk of a far block is the first",
            "torch.mm(call.blocks[source][rows], b_kn", "torch.mm(call.blocks[source][: rows.stop - rows.start], b_kn"),
    ENGINES("every sum is that of the first chunk", "self._sum_for(leg.block, leg.chunk)", "self._sum_for(leg.block, 0)"),
    ENGINES("a scatter across nodes expects whole blocks",
            "self._partials.shape[1:], self._a.dtype, self._tag, self._plan.chunks)",
            "self._partials.shape[1:], self._a.dtype, self._tag)"),
]  # fmt: skip
