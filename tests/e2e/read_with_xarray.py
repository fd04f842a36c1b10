"""Reads the sample run (unit_runfile --write FILE) as a stranger would: xarray with the engine given, nothing of kvlab."""
import sys
import xarray

path, engine = sys.argv[1:]
root, config, memory, layers, steps, quality = (
    xarray.open_dataset(path, engine=engine, group=g, mask_and_scale=False) for g in ("/", "config", "memory", "layers", "steps", "quality"))
assert root.attrs["status"] == "complete" and root.attrs["schema_version"] == 1, root.attrs
assert config.attrs["kv"] == "k=kivi(bits=2) café", config.attrs
assert memory.bytes.dims == ("class", "layer") and memory.bytes.units == "byte" and int(memory.bytes[1, 2]) == 1 << 60
assert layers.error.dims == ("layer",) and layers.layer.values.tolist() == [0, 1, 2] and layers.error.sel(layer=2) == 0.125
assert layers.sizes["kept"] == 0 and quality.attrs["ppl"] == 12.25 and quality.n.values.tolist() == [511, 512, 513]
assert list(steps) == ["t_ns", "phase", "delta", "nll", "loss", "committed"] and steps.nll.dims == ("steps_row",), steps
assert int(steps.committed) == steps.sizes["steps_row"] == 1000 and steps.t_ns.units == "ns" and int(steps.t_ns[3]) == 2**64 - 5
assert steps.phase.values[:2].tolist() == ["decode", "préfill"] and int(steps.delta.sum()) == -499500, steps.phase.values[:2]
assert steps.nll.values[999] == 333.0 and steps.loss.dtype == "float32" and steps.loss.long_name == "loss in single precision"
