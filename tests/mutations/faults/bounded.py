"""Faults of calls that nothing can interrupt, and of who watches over them."""

from __future__ import annotations

from tests.mutations.mutation import In

TEST, AGREE, DOCTOR = (f"tests/unit/test_{name}.py" for name in ("bounded", "agreement", "doctor_transports"))
BOUNDED = In("overlap_train/symmetric/bounded.py", (TEST,))
NVSHMEM = In("overlap_train/symmetric/nvshmem.py", (f"{TEST}::test_every_collective_call_of_nvshmem_is_bounded",))
TORCH = In("overlap_train/symmetric/torch_symm.py", (f"{TEST}::test_the_rendezvous_of_torch_is_bounded",))
NCCL = In("overlap_train/symmetric/nccl.py", (f"{TEST}::test_nccl_connects_and_leaves_within_bounds",))
AGREEMENT = In("overlap_train/symmetric/agreement.py", (AGREE,))
STORE = In("overlap_train/symmetric/store.py", (AGREE,))
WARN = In("overlap_train/warn.py", ("tests/unit/test_watchdog.py",))
NETWORK = In("overlap_train/tools/doctor/network.py", (DOCTOR,))
OPERATOR = In("overlap_train/tools/doctor/operator.py", (DOCTOR,))
EXAMINATION = In("overlap_train/tools/doctor/examination.py", (DOCTOR,))
JOB = In("overlap_train/tools/doctor/job.py", (DOCTOR,))

FAULTS = [
    BOUNDED("a call that does not end is not ended", "        os.kill(process, signal.SIGKILL)\n", "",
            f"{TEST}::test_another_process_with_the_number_of_one_that_is_gone_is_left_alone",
            f"{TEST}::test_a_call_that_does_not_end_is_named_and_its_process_ended"),
    BOUNDED("a call that does not end is ended without a word", 'os.write(2, f"{error}\\n".encode())', "pass"),
    BOUNDED("who watches outlives the call", "        self._process.kill()\n", "        self._process.poll()\n"),
    BOUNDED("who watches outlives the process", "stdin=subprocess.PIPE, ", ""),
    BOUNDED("another process is ended", "if not has_ended and os.getppid() == process:", "if not has_ended:"),
    BOUNDED("a process that has ended is ended", "if not has_ended and os", "if os",
            survives="it closes its files a moment before it is nobody's parent any more"),
    BOUNDED("a call that raised is watched for ever", "    try:\n        yield\n    finally:\n        watcher",
            "    yield\n    if True:\n        watcher"),
    BOUNDED("a process that cannot be started ends the call of one rank", "except OSError as failure:",
            "except KeyError as failure:", f"{TEST}::test_a_call_that_nobody_can_watch_goes_on_with_a_warning"),
    BOUNDED("an embedded Python is not expected", 'sys.executable or ""', "sys.executable",
            f"{TEST}::test_a_call_that_nobody_can_watch_goes_on_with_a_warning"),
    NVSHMEM("NVSHMEM starts without a limit", "with bounded(_START, callers):", "if True:"),
    NVSHMEM("NVSHMEM allocates without a limit", "with bounded(_ALLOCATE, self._callers):", "if True:"),
    NVSHMEM("NVSHMEM frees without a limit", 'with bounded("overlap_train: free NVSHMEM memory", self._callers):', "if True:"),
    NVSHMEM("NVSHMEM ends without a limit", 'with bounded("overlap_train: end NVSHMEM", _worlds[0]):', "if True:"),
    NVSHMEM("ranks of other nodes are said to be waited for", "agreement.callers(world)", "agreement.callers()"),
    TORCH("torch has no limit", "with bounded(_OPEN, callers):", "if True:"),
    NCCL("NCCL connects without a limit", "with bounded(CONNECT, self._callers):", "if True:"),
    NCCL("NCCL leaves without a limit", 'with bounded("overlap_train: disconnect the nodes of the group", self._callers):',
         "if True:"),
    AGREEMENT("the doctor's limit is not used", "self.call_s or max", "max"),
    AGREEMENT("a short time-out ends a process whose library starts", "max(self.timeout_s, _LEAST_CALL_S)", "self.timeout_s"),
    AGREEMENT("callers are numbered within their group", "Callers(ranks[self.rank],", "Callers(self.rank,"),
    AGREEMENT("ranks wait for ever for a store that is stopped", "return answer(in_turn,",
              "return in_turn() or (",
              f"{AGREE}::test_a_store_whose_process_is_stopped_is_said_so"),
    AGREEMENT("domains are counted without a limit", "return self._answer(partial(self._counted, step),",
              "return (lambda _: self._counted(step, threading.Event()))(",
              f"{AGREE}::test_a_store_whose_process_is_stopped_is_said_so"),
    AGREEMENT("a thread that is left behind takes part in the next round", "            given_up.set()\n", "            pass\n",
              f"{AGREE}::test_nobody_is_left_behind_in_a_round_that_was_interrupted"),
    AGREEMENT("what an interrupted rank has told stays", "self._store.delete_key(keys[self.rank])\n                raise I",
              "raise I", f"{AGREE}::test_nobody_is_left_behind_in_a_round_that_was_interrupted"),
    AGREEMENT("two threads of a rank ask at once", "with self._asks:", "if True:",
              f"{AGREE}::test_what_a_rank_asks_waits_for_a_thread_that_is_left_behind"),
    AGREEMENT("a domain counts that was never made", "        if given_up.is_set():  # the", "        if False:  # the",
              f"{AGREE}::test_a_domain_that_was_counted_too_late_does_not_count"),
    AGREEMENT("a thread that is left behind goes on", "if given_up.is_set():\n                self",
              "if False:\n                self",
              f"{AGREE}::test_nobody_is_left_behind_in_a_round_that_was_interrupted"),
    AGREEMENT("a silent store is named in place of a late rank", "_ANSWER_OF_RANK_S = 1.0,", "_ANSWER_OF_RANK_S = -0.05,",
              f"{AGREE}::test_those_who_do_not_come_are_named_and_those_who_came_are_not"),
    WARN("a warning that is an error ends the call of one rank", "except Warning:", "except ImportError:"),
    STORE("nobody asks the store while Python ends", "return ask()", "raise",
          f"{AGREE}::test_the_store_answers_while_python_ends"),
    STORE("what the store raises is lost", "future.set_exception(error)", "pass",
          f"{AGREE}::test_a_store_that_is_gone_is_said_so"),
    NETWORK("a process ends before the doctor reports on the network", "domain.agreement.call_s = settings.call_s", "pass"),
    OPERATOR("a process ends before the doctor reports on operators", ".agreement.call_s = trial.call_s", ""),
    EXAMINATION("checks of memory are ended at their limit", "provider=provider, call_s=self._asked.limit + CALL_S)",
                "provider=provider, call_s=self._asked.limit)"),
    EXAMINATION("checks of links are ended at their limit", "self._asked.provider, self._asked.limit + CALL_S)",
                "self._asked.provider, self._asked.limit)"),
    EXAMINATION("checks of operators are ended at their limit", "call_s=limit_s + CALL_S", "call_s=limit_s"),
    EXAMINATION("checks of networks are ended at their limit", "limit + seconds + CALL_S", "limit + seconds"),
    JOB("the stacks come before the name of the call", "_BACKSTOP_S = 60.0", "_BACKSTOP_S = 20.0"),
    JOB("the name of the call comes before the report", "CALL_S = 30.0", "CALL_S = 20.0"),
]  # fmt: skip
