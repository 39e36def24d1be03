"""Faults of what the doctor tries and reports on one node."""

from __future__ import annotations

from tests.mutations.mutation import In

PROCESSES = "tests/protocol/test_doctor_processes.py"
HARDWARE = "tests/unit/test_doctor_hardware.py"
OPERATOR = In("overlap_train/tools/doctor/operator.py", (f"{PROCESSES}::test_every_method_that_auto_takes_is_tried",))
LINKS = In("overlap_train/tools/doctor/links.py", ("tests/unit/test_plan_inputs.py",))
NETWORK = In("overlap_train/tools/doctor/network.py", ("tests/unit/test_plan_inputs.py",))
LISTED = In("overlap_train/tools/plan/tables.py", ("tests/unit/test_plan_inputs.py",))
SYSTEM = In("overlap_train/tools/doctor/system.py", ("tests/unit/test_plan_inputs.py",))
REPORT = In("overlap_train/tools/doctor/report.py", ("tests/unit/test_doctor.py",))
TOOLCHAIN = In("overlap_train/tools/doctor/toolchain.py", ("tests/unit/test_doctor_installation.py",))
_TRIAL = f"{HARDWARE}::test_the_trial_has_every_method_that_untuned_auto_takes"

FAULTS = [
    OPERATOR("the doctor does not try direct", '= ("direct",) if tma_reads', "= () if tma_reads", _TRIAL),
    OPERATOR("the doctor tries direct where no Hopper kernel serves",
             "if tma_reads(here.device, torch.bfloat16, 4096, n // size)", "if True", _TRIAL),
    OPERATOR("the doctor does not try low_latency", '*direct, "low_latency")', "*direct)", _TRIAL),
    OPERATOR("low_latency gets more rows than auto gives it", "few_rows=16 * size)", "few_rows=m)", _TRIAL),
    OPERATOR("low_latency gets the rows of the others", "trial.few_rows if TRAITS[method].few_rows else trial.m", "trial.m"),
    OPERATOR("low_latency gets all-to-alls", "if not TRAITS[method].few_rows:\n", "if True:\n"),
    OPERATOR("the others get no all-to-alls", "if not TRAITS[method].few_rows:\n", "if False:\n",
             f"{PROCESSES}::test_wrong_exchanges_are_found"),
    OPERATOR("low_latency is timed with many rows", "for method in trial.methods if not TRAITS[method].few_rows}",
             "for method in trial.methods}", f"{PROCESSES}::test_methods_for_few_rows_are_not_timed_with_many"),
    OPERATOR("only the first operator is compared", "in zip(results, ", "in zip(results[:1], ",
             f"{PROCESSES}::test_wrong_exchanges_are_found"),
    LINKS("slow links leave no figure", "[replace(first, figure=min(mine.values())), *others]", "[first, *others]"),
    LINKS("a rank copies as fast as over its fastest link", "figure=min(mine.values())", "figure=max(mine.values())"),
    LINKS("every slow link counts as a rank", "*others]", "*(replace(other, figure=min(mine.values())) for other in others)]"),
    LINKS("products leave no figure", "return replace(found, figure=tflops)", "return found"),
    NETWORK("the network leaves no figure", "return [replace(found, figure=gbs)]", "return [found]"),
    SYSTEM("a card of the family is taken for the one whose facts are known", "    if device_name in CARDS:\n", "    if True:\n"),
    SYSTEM("the device is not asked for its SMs", "crossed=not plays_nodes, sms=sms)", "crossed=not plays_nodes)"),
    SYSTEM("the device's SMs are not taken", "sms=sms or base.sms)", "sms=base.sms)"),
    SYSTEM("SMs that no device has told are known", '_ASSUMED if sms else ("sms", *_ASSUMED)', "_ASSUMED"),
    SYSTEM("the peak of a variant is its family's", "peak_tflops=known.peak_tflops)", "peak_tflops=card.peak_tflops)"),
    SYSTEM("a peak that nobody knows is known", 'assumed = ("peak_tflops", *assumed)', "pass"),
    SYSTEM("another card has the name of the one that is known",
           'name=device_name.removeprefix("NVIDIA ").lower(), assumed', "assumed"),
    SYSTEM("the doctor does not say what is assumed",
           'another card" if system.assumed else ""', 'another card" if False else ""'),
    LISTED("a plan does not list what is assumed", "    if system.assumed:\n", "    if False:\n"),
    SYSTEM("plans do not reckon with the measured network", '"nic_gbs", 1.0, network)', '"nic_gbs", 1.0, [])'),
    SYSTEM("what goes between ranks of one machine is a network", "if crossed else []", "if True else []"),
    TOOLCHAIN("any compiler does where CC names one", '[asked] if asked else ["gcc", "clang"]', '[asked or "", "gcc", "clang"]'),
    TOOLCHAIN("headers do not matter", 'if not Path(headers, "Python.h").is_file():', "if False:"),
    TOOLCHAIN("CPUs need a compiler", "if not on_gpu:", "if False:"),
    REPORT("what is measured keeps equal lines apart", 'host="", figure=None)', 'host="")'),
]  # fmt: skip
