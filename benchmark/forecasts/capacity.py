"""Is the capacity that the simulator predicts the one that a server has?

    python -m benchmark.forecasts.capacity
    python -m benchmark.forecasts.capacity --rounds 2
    python -m benchmark.forecasts.capacity --model 0.07b

Run by hand on a quiet machine, some six minutes on cores with AMX, with two rounds ten. Cores
without AVX-512 take as long with the model of the third line. One server is recorded
under calibration loads, from which its step times are fitted. Then, for each of three loads, the
highest rate with 90 % goodput is searched twice: in the simulator, and with real requests, the
same ones at the same moments, from the same guess by the same rule. The interval of an error is of
pairs: a sample draws the same requests on both sides. Targets are multiples of what a request of
the load gets alone, since a machine's pace differs from hour to hour.

None of the three is among the calibration loads. But the stream among these, of up to 64 tokens in
and 96 out at 16 requests a second, is near the second of the three, 48 in and 128 out, and near its
capacity: there the prediction goes from a load to a similar one, not to a new one.

A load must arrive for longer than its requests stay, else its rate is that of a burst, and depends
on their number. `--scale` multiplies the numbers of requests.

Calibration and measurement lie minutes apart, so the prediction is made a second time with one
number of the measured runs: how much slower their steps were than the fit says (`slowness_of`).
That leaves the error that is the simulator's own. How much a capacity depends on the pace is shown
as its loss on a machine that is 5 % slower. A first token takes the front's milliseconds besides,
which are what a request alone takes longer than simulated.

A second table has each trial of both sides: the share within either target, the latencies, and
what the server's processes and the clients took of the cores.
"""

import sys

import msgspec

from benchmark.forecasts.capacity_bench import (
    ENGINE,
    LOADS,
    NEEDED_SHARE,
    TPOT_FACTOR,
    TTFT_FACTOR,
    CapacityBench,
)
from benchmark.forecasts.capacity_tables import capacity_table, trial_table
from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, progress, say
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model
from benchmark.support.other_work import ProcessorTimes
from benchmark.support.paths import SCRATCH


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=1, port=31900)
    add = command.add
    add("--scale", type=float, default=1.0, help="of the numbers of requests (default: 1)")
    add("--model", default=DEFAULT_PRESET, choices=PRESETS, help=f"(default: {DEFAULT_PRESET})")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    model, vocab_size = make_model(options.model), PRESETS[options.model].vocab_size
    engine = parse_engine(ENGINE, model, options.port, SCRATCH, usable_cores())
    checked = []
    with running(engine, SCRATCH / "capacity.log") as server, progress(4, "loads") as progress_bar:
        assert server is not None
        before = ProcessorTimes.now(server)
        bench = CapacityBench(engine, server.pid, options.scale, options.rounds, vocab_size)
        pipeline = bench.calibrate()
        progress_bar.update()
        for name in LOADS:
            say(f"{name}:")
            checked.append(bench.check(name, pipeline))
            say(f"  {capacity_table([checked[-1]]).splitlines()[-1]}")
            progress_bar.update()
        others = f"{before.others_share(ProcessorTimes.now(server)):.0%}"
    errors = ", ".join(f"{one:.1%}" for one in pipeline.costs().errors)
    return Report(
        name="capacity",
        texts=[
            capacity_table(checked),
            f"Goodput {NEEDED_SHARE:.0%}; intervals are 95 %, of a bootstrap over the requests"
            f"{' and rounds' if options.rounds > 1 else ''}, those of errors by pairs. "
            f"Mean error of the fit's step times: {errors}. Other processes took {others} of the "
            "processors.",
            trial_table(checked),
        ],
        facts={
            "model": {options.model: ENGINE},
            "load": {
                "requests a round": f"{options.scale:g} times "
                f"{', '.join(str(number) for _, number in LOADS.values())}; "
                f"{options.rounds} rounds at each rate",
                "targets": f"{TTFT_FACTOR:g} times the TTFT and {TPOT_FACTOR:g} times the TPOT "
                "within which 90 % of requests are alone",
                "prefix caches": "off",
            },
            "processors": {"taken by others": others},
        },
        record={"checked": [msgspec.to_builtins(one) for one in checked]},
    )


if __name__ == "__main__":
    sys.exit(main())
