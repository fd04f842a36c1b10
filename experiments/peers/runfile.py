"""Run files for measurements that kvlab did not make itself, in the layout of kvlab's own (host/lab/README.md): tables are groups
whose columns share one row axis, every axis is a dimension scale, every column has units. Needs h5py."""
import datetime
import hashlib
import os
import shlex
import socket
import subprocess
import sys

import h5py
import numpy as np

SCHEMA_VERSION = 1
AXIS_WITHOUT_VALUES = "This is a netCDF dimension but not a netCDF variable."
FILL = {"u": np.uint64(2**64 - 1), "i": np.int64(-(2**63)), "f": np.float64("nan")}


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit():
    here = os.path.dirname(os.path.abspath(__file__))
    found = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def put_text(place, name, value):
    place.attrs.create(name, np.bytes_(value.encode()), dtype=h5py.string_dtype("utf-8", max(1, len(value.encode()))))


def put_attributes(place, values):
    for name, value in values.items():
        if isinstance(value, str):
            put_text(place, name, value)
        else:
            place.attrs[name] = np.float64(value) if isinstance(value, float) else np.int64(value)


class RunFile:
    """with RunFile(path, config) as run: run.table(...). The file is path + ".part" until the block ends well."""

    def __init__(self, path, title, config):
        self.path, self.part = path, path + ".part"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.exists(path):
            raise FileExistsError(f"{path}: a run file is never written over")
        self.file = h5py.File(self.part, "x", track_order=True)
        settings = "".join(f"{name}={value}\n" for name, value in config.items())
        put_attributes(self.file, {
            "Conventions": "CF-1.8",
            "title": title,
            "schema_version": SCHEMA_VERSION,
            "command_line": shlex.join(sys.argv),
            "git": commit(),
            "host": socket.gethostname(),
            "status": "running",
            "start": now(),
            "config_hash": hashlib.sha256(settings.encode()).hexdigest(),
        })
        put_attributes(self.file.create_group("config"), config)

    def table(self, name, columns, rows):
        """columns: [(name, units, long_name)]; rows: sequences of values in that order. Text, whole numbers and floats."""
        group = self.file.create_group(name, track_order=True)
        axis = self._axis(group, f"{name}_row", len(rows))
        for i, (column, units, long_name) in enumerate(columns):
            values = [row[i] for row in rows]
            if isinstance(values[0], str):
                data = self._put_texts(group, column, values)
            else:
                array = np.array(values, "f8" if any(isinstance(v, float) for v in values) else "u8")
                data = group.create_dataset(column, data=array)
                data.attrs["_FillValue"] = FILL[array.dtype.kind]
            data.dims[0].attach_scale(axis)
            put_attributes(data, {"units": units, "long_name": long_name})
        committed = group.create_dataset("committed", data=np.uint64(len(rows)))
        put_attributes(committed, {"units": "1", "long_name": "rows that are complete in all columns"})

    def _axis(self, group, name, n):
        if name not in group:
            axis = group.create_dataset(name, shape=(n,), dtype="f4")
            axis.make_scale(f"{AXIS_WITHOUT_VALUES}{n:10d}")
        return group[name]

    def _put_texts(self, group, name, values):
        """Characters [row][width]: netCDF readers know no strings of fixed length."""
        encoded = [value.encode() for value in values]
        width = max(1, max(map(len, encoded)))
        letters = np.array(encoded, f"S{width}").view("S1").reshape(len(values), width)
        data = group.create_dataset(name, data=letters)
        put_text(data, "_Encoding", "utf-8")
        data.dims[1].attach_scale(self._axis(group, f"text{width}", width))
        return data

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        status = "complete" if kind is None else "interrupted" if kind is KeyboardInterrupt else "failed"
        put_attributes(self.file, {"status": status, "end": now()})
        self.file.close()
        if kind is None:
            os.rename(self.part, self.path)
