#!/usr/bin/env python3
"""kvlab and llama.cpp in turns on the same tests: medians, ratios, a run file. See why.md."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PEERS = os.path.join(ROOT, "experiments", "peers")
sys.path.append(PEERS)
from runfile import RunFile  # noqa: E402


CACHES = {"f16": "f16", "q8_0": "int8", "q4_0": "int4"}  # llama.cpp's and kvlab's, equal bits an element
TESTS = "pp512,tg128,tg32@d4096"
COLUMNS = [
    ("program", "1", "llama.cpp or kvlab"),
    ("device", "1", "name of the OpenCL device, of llama.cpp cpu"),
    ("cache", "1", "cache type as the program calls it"),
    ("bits", "1", "bits an element of the cache, nominal"),
    ("test", "1", "pp: prefill, tg: decode, @d: behind that many tokens"),
    ("pair", "1", "number of the pair"),
    ("n_tokens", "1", "tokens timed"),
    ("duration_ns", "ns", "their wall time"),
    ("tokens_per_s", "s-1", "n_tokens / duration_ns"),
    ("load", "1", "load average of the machine when the sample was begun"),
]
NAMES = [name for name, _, _ in COLUMNS]
BITS = {"f16": 16.0, "q8_0": 8.5, "int8": 8.5, "q4_0": 4.5, "int4": 4.5}


def output_of(command, device=None):
    environment = dict(os.environ, KVLAB_DEVICE=device) if device else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    if done.returncode != 0:
        sys.exit(f"run.py: exit code {done.returncode} of {' '.join(command)}")
    return done.stdout


def time_llama_cpp(args, cache, _):
    lines = output_of([args.python, os.path.join(PEERS, "llama_cpp.py"), "-m", args.model, "--cache", cache, "--tests", args.tests, "--threads", str(args.threads)])
    return [("cpu", row["test"], row["n_tokens"], row["ns"]) for row in map(json.loads, lines.splitlines())]


def bench_options(test):
    length, _, depth = test.partition("@d")
    prompt, gen = (length[2:], "0") if length.startswith("pp") else ("0", length[2:])
    return ["-p", prompt, "-n", gen, "-d", depth or "0"]


def time_kvlab(args, cache, device):
    samples = []
    for test in args.tests.split(","):
        text = output_of([args.kvlab, "bench", "-m", args.model, "--kv", cache, "-r", "1", "--json", "--no-run-file", *bench_options(test)], device)
        (row,) = json.loads(text)
        samples.append((row["device"], row["test"], row["n_prompt"] + row["n_gen"], row["samples_ns"][0]))
    return samples


def measure_pair(args, pair):
    rows = []
    for peer_cache, own_cache in CACHES.items():
        sides = [("llama.cpp", time_llama_cpp, peer_cache, None)] + [("kvlab", time_kvlab, own_cache, device) for device in args.devices]
        for program, time_side, cache, device in sides if pair % 2 == 0 else sides[::-1]:
            load = os.getloadavg()[0]
            for name, test, n, ns in time_side(args, cache, device):
                rows.append(dict(zip(NAMES, (program, name, cache, BITS[cache], test, pair, n, ns, n * 1e9 / ns, load))))
                print(f"pair {pair + 1} of {args.pairs}  {program:9} {cache:5} {test:12} {n * 1e9 / ns:8.1f} tokens/s  {name}", file=sys.stderr)
    return rows


def measure(args):
    """Rows of all pairs; each pair is kept in a file of lines as soon as it is there, and a second start goes on behind the last."""
    kept = args.output + ".pairs"
    rows = []
    if os.path.exists(kept):
        with open(kept) as file:
            rows = [row for line in file for row in json.loads(line)]
    began, first = time.monotonic(), 1 + max((row["pair"] for row in rows), default=-1)
    for pair in range(first, args.pairs):
        spent = time.monotonic() - began
        if pair > first and spent * (pair - first + 1) / (pair - first) > args.minutes * 60:
            print(f"run.py: {pair} of {args.pairs} pairs after {spent / 60:.1f} minutes; start it again with -o {args.output} for the rest", file=sys.stderr)
            break
        found = measure_pair(args, pair)
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        with open(kept, "a") as file:
            file.write(json.dumps(found) + "\n")
        rows += found
    return rows


def rates(rows, device, bits, test):
    return [row["tokens_per_s"] for row in rows if (row["device"], row["bits"], row["test"]) == (device, bits, test)]


def summarize(args, rows):
    """[(device, cache, test, llama.cpp's median, kvlab's median, median, least and most of the pairs' ratios)]"""
    out = []
    for device in dict.fromkeys(row["device"] for row in rows if row["program"] == "kvlab"):
        for cache in CACHES:
            for test in args.tests.split(","):
                peer, own = rates(rows, "cpu", BITS[cache], test), rates(rows, device, BITS[cache], test)
                ratios = [b / a for a, b in zip(peer, own)]
                out.append((device, cache, test, statistics.median(peer), statistics.median(own), statistics.median(ratios), min(ratios), max(ratios)))
    return out


def print_table(summary, rows):
    print(f"| device | cache | test | llama.cpp tok/s | kvlab tok/s | kvlab / llama.cpp, median of {1 + max(row['pair'] for row in rows)} | least | most |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for device, cache, test, peer, own, ratio, least, most in summary:
        print(f"| {device} | {cache}, {CACHES[cache]} | {test} | {peer:.1f} | {own:.1f} | {ratio:.2f} | {least:.2f} | {most:.2f} |")


def write_run_file(args, rows, summary):
    config = {"command": "e00_peer_speed", "model": os.path.basename(args.model), "threads": args.threads, "pairs": args.pairs, "tests": args.tests,
              "devices": ",".join(device or "default" for device in args.devices), "cpu": cpu_name()}
    with RunFile(args.output, "speed of kvlab and llama.cpp", config) as run:
        run.table("samples", COLUMNS, [tuple(row[name] for name in NAMES) for row in rows])
        run.table("ratios", [
            ("device", "1", "name of kvlab's OpenCL device"),
            ("cache", "1", "llama.cpp's cache type; kvlab's has the same bits an element"),
            ("test", "1", "pp: prefill, tg: decode, @d: behind that many tokens"),
            ("peer_tokens_per_s", "s-1", "median of llama.cpp"),
            ("tokens_per_s", "s-1", "median of kvlab"),
            ("ratio", "1", "median over pairs of kvlab's speed / llama.cpp's"),
            ("ratio_min", "1", "least of the pairs"),
            ("ratio_max", "1", "most of the pairs"),
        ], summary)
    os.remove(args.output + ".pairs")
    print(f"run file: {args.output}", file=sys.stderr)


def cpu_name():
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="data/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="no pair is begun that would end later; started again with the same -o, the script goes on")
    parser.add_argument("--devices", default=os.environ.get("KVLAB_DEVICE", ""), help="of kvlab, as for --device: comma list, each timed in every pair (default: $KVLAB_DEVICE)")
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp; kvlab's device takes all cores")
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "build", "kvlab"))
    parser.add_argument("--python", help="the Python that has llama_cpp (default: what experiments/peers/setup.sh builds)")
    parser.add_argument("-o", "--output", default=time.strftime("runs/e00_peer_speed-%Y%m%d-%H%M%S.h5", time.gmtime()))
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    args.devices = args.devices.split(",")
    args.model, args.kvlab, args.output = (os.path.abspath(os.path.join(ROOT, path)) for path in (args.model, args.kvlab, args.output))
    args.python = args.python or output_of([os.path.join(PEERS, "setup.sh")]).strip()
    return args


def main():
    args = parse_arguments()
    if os.getloadavg()[0] > 0.5:
        print(f"run.py: the load is {os.getloadavg()[0]:.1f}: something else runs here, the numbers will not be worth much", file=sys.stderr)
    rows = measure(args)
    summary = summarize(args, rows)
    print_table(summary, rows)
    if 1 + max(row["pair"] for row in rows) == args.pairs:
        write_run_file(args, rows, summary)


if __name__ == "__main__":
    main()
