"""Faults of self-attention under Ulysses' context parallelism."""

from __future__ import annotations

from tests.mutations.mutation import In

M = "integrations/megatron/"
TRAINING, FOUR = "tests/megatron/test_ulysses.py", "tests/megatron/test_ulysses_four.py"
REFUSALS, TE = "tests/megatron/test_ulysses_refusals.py", "tests/megatron/test_ulysses_te.py"
GATHERED = TRAINING + "::test_weights_that_are_gathered_in_forward_hooks_are_waited_for"

KEPT = "tests/megatron/test_whole_sequence.py"
ALONE = TRAINING + "::test_gradients_are_those_of_one_rank"
PATIENCE = TRAINING + "::test_ranks_wait_for_parts_as_long_as_the_settings_say"
SAYS = (
    "tests/megatron/test_script.py::test_packs_that_say_how_they_are_cut_are_refused_with_a_loader_that_cuts_otherwise"
)

collective = In(M + "attention/collective.py", (TRAINING + "::test_gradients_are_those_of_one_rank",))
whole = In(M + "attention/whole.py", (TRAINING + "::test_gradients_are_those_of_one_rank",))
gather = In(M + "attention/gather.py", (KEPT,))
turned = In(M + "enabling/ulysses.py", (TRAINING,))
attention = In(M + "attention/self_attention.py", (TRAINING + "::test_gradients_are_those_of_one_rank",))
norms = In(M + "attention/norms.py", (TRAINING + "::test_norms_are_within_the_pass_where_both_can_be",))
core = In(M + "attention/core.py", (TE,))
linears = In(M + "linears/ulysses.py", (TRAINING + "::test_calls_that_fall_back_add_to_the_same_gradient",))
two_groups = In(M + "linears/two_groups.py", ("tests/megatron/test_fallback_reason.py",))
state = In(M + "linears/exchange.py", (TRAINING,))
packed = In(M + "packed.py", (TRAINING + "::test_rows_of_no_document_stay_out",))
within = In(M + "spec/packed.py", (TRAINING + "::test_rows_of_no_document_stay_out",))

FAULTS = [
    gather("the ranks wait for parts as long as torch does", "if not poll(work.is_completed, timeout_s, late=late):", "if 0:"),
    gather("nobody says that a part is late", "timeout_s, late=late):", "timeout_s):"),
    whole("masks have a time-out of their own", "- 2, exchange, self.timeout_s", "- 2, exchange, 5.0", KEPT),
    whole("frequencies have a time-out of their own", "(freqs, 0, exchange, self.timeout_s)", "(freqs, 0, exchange, 5.0)", KEPT),
    turned("no setting says how long parts are waited for", "attention.whole.timeout_s = timeout_s", "pass", PATIENCE),
    collective("q, k and v stay in the order of the ranks", "exchange.places)", "exchange.order)"),
    collective("the context is sent in the order of the sequence", "context.index_select(0, exchange.order)", "context"),
    collective("k and v of one head go to one rank only", "max(1, ranks // k.size(2))", "1"),
    gather("rotary frequencies in the order of the ranks", "whole.index_select(0, exchange.places)", "whole", ALONE),
    whole("what inference has made is kept for training", "with torch.inference_mode(False):", "with torch.no_grad():",
          TRAINING + "::test_training_goes_on_after_inference"),
    whole("all masks are kept", "{_MASK: 1, ", "{", KEPT),
    whole("frequencies of all packs are kept", "_FREQS: 2, ", "", KEPT),
    whole("angles of all packs are kept", ", _ROTARY: 2", "", KEPT),
    packed("row numbers of inference are kept for training",
           "with torch.inference_mode(False):  # training may ask next", "with torch.no_grad():", KEPT),
    In(M + "launcher/hooks.py", (SAYS,))(
        "a loader whose cut nobody knows is trusted", 'if ours and hasattr(PackedSeqParams, "cp_partition_mode"):', "if False:"),
    whole("masks displace what stays the same", "self._answers[key[0]]", "self._answers[_MASK]", KEPT),
    linears("calls that exchange nothing leave no word", "or self.overlap.has_told_nothing", "", FOUR),
    linears("validation decides what the table says", "reason is None or self.overlap.has_told_nothing", "True", FOUR),
    whole("positions count on from document to document", "if whole_pack and count", "if True or count", TRAINING),
    attention("q is rotated before its norm sees it", "None if norms_follow else self", "self"),
    attention("q and k are normalised twice", "            if norms_follow:", "            if norm or norms_follow:",
              TRAINING + "::test_norms_are_within_the_pass_where_both_can_be"),
    norms("norm: eps and kind of k do not matter", "or how != _how(k_norm, weight)", "or False"),
    norms("norm: hooks wait in vain", " or _is_watched(norm)", ""),
    norms("norm: weights are taken before they are gathered", "            hook(norm, ())\n", "            pass\n",
          TRAINING + "::test_norms_whose_weights_are_gathered_late_are_within_the_pass"),
    norms("norm: any hook passes for DDP's", "return not gathering or any", "return any"),
    norms("norm: a subclass is taken for an RMSNorm", "if type(norm) is RMSNorm:", "if isinstance(norm, RMSNorm):",
          TRAINING + "::test_gradients_are_those_of_one_rank"),
    norms("norm: k has the weight of q", "q_norm.weight, k_norm.weight", "q_norm.weight, q_norm.weight"),
    norms("norm: weights of another dtype", "(norm.weight.dtype, norm.weight.device) != (weight.dtype, weight.device)", "False"),
    attention("documents are cut as one sequence",
              "documents.with_rest(rows) if documents is not None and cut == ZIGZAG else ()", "()"),
    attention("a pack that is cut as one sequence is refused", "ZIGZAG if cut == ZIGZAG_OF_PACK else cut", "cut"),
    packed("a pack says nothing, and the loader is not asked", "getattr(config, _CUTS_PACKS, False)", "False",
           "tests/megatron/test_script.py::test_packs_are_taken_as_the_scripts_loader_cuts_them"),
    attention("a cut that a pack names is taken for a zigzag", "cut = cut_of(packed_seq_params, self.config)", 'cut = "zigzag"'),
    attention("a micro-batch without a group exchanges",
              "is not None else self.pg_collection.cp", "is ... else self.pg_collection.cp",
              REFUSALS + "::test_the_group_may_change_with_the_call"),
    attention("a micro-batch with a group of its own takes the model's", "            return packed.cp_group\n",
              "            return self.pg_collection.cp\n",
              "tests/megatron/test_ulysses_four.py::test_the_group_may_change_with_the_call"),
    linears("weights that are still being gathered are multiplied",
            "self._call(x, partial(self._to_heads, exchange=exchange, norm=norm, rotary=rotary))",
            "self._to_heads(x, exchange, norm, rotary)", GATHERED),
    linears("output weights that are still being gathered are multiplied",
            "self._call(x, partial(self._to_rows, exchange=exchange))", "self._to_rows(x, exchange)", GATHERED),
    attention("padding between documents keeps what the core attention leaves there", "without_rows(context, padding)", "context",
              TE),
    attention("gradients of padding between documents are what the core attention leaves there",
              "            q, k, v = (without_rows(x, padding) for x in (q, k, v))\n", "", TE),
    core("the core attention has all heads", "own.num_attention_heads, own.num_query_groups = heads.query * tp, heads.kv * tp",
         "pass"),
    core("the core attention exchanges, too", "own.context_parallel_size, own.cp_comm_type = 1, None", "pass"),
    linears("a call that falls back loses its weight gradient", "through_main_grad(self, weight)", "weight"),
    linears("calls that fall back fuse as Megatron says", "call = fused_alike(self, weight, kwargs)", "call = kwargs"),
    state("the table forgets the group", "self.groups[group] = None", "pass",
          TRAINING + "::test_the_table_says_what_is_exchanged_and_names_are_megatrons"),
    two_groups("two groups: products as Megatron cuts them are taken for whole ones",
               "linear.weight.shape[0] != exchange.heads.features", "False"),
    two_groups("two groups: nodes do not count", "if x.is_cuda else None", "if False else None"),
    two_groups("two groups: ranks agree on nodes for short sequences", "    if parts_of_call(linear, x, exchange) == 1:",
               "    nodes_of_groups(_groups(linear, exchange), linear.overlap.config, x.device, linear.overlap.name)\n"
               "    if parts_of_call(linear, x, exchange) == 1:"),
    two_groups("two groups: CPU processes agree on nodes in vain", "if x.is_cuda else None", "if True else None"),
    two_groups("two groups: auto takes what is not measured", 'max(nodes) > 1 and config.method == "auto"', "False"),
    two_groups("two groups: auto asks NVSHMEM for a second world", 'config.provider == "nvshmem"', "False"),
    two_groups("two groups: NVSHMEM is left out where a method is named",
               'config.method == "auto" and config.provider', "config.provider"),
    two_groups("two groups: auto takes nothing", 'max(nodes) > 1 and config.method == "auto"', 'config.method == "auto"'),
    two_groups("two groups: methods that are named do not cross nodes",
               'max(nodes) > 1 and config.method == "auto"', "max(nodes) > 1"),
    two_groups("two groups: any sequence is cut", "if parts_of_call(linear, x, exchange) == 1:", "if False:"),
    linears("two groups: only the Ulysses group is told", "exchange.shards(self.tp_group), heads=",
            "exchange.shards(None), heads=", FOUR),
    packed("lengths that have changed are not read again", "if kept is None or kept[0] != key", "if kept is None"),
    packed("documents keep their padding",
           "torch.arange(start, start + length, device", "torch.arange(start, start + length + 1, device"),
]  # fmt: skip
