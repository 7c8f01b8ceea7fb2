"""Writes forms/*.pickle: the forms of memory snapshots that the real ones beside this file lack."""

import copy
import pathlib
import pickle
import pickletools

HERE = pathlib.Path(__file__).parent / "forms"
MIB = 1 << 20


def frames(*names):
    return [{"name": name, "filename": "train.py", "line": 10 + n} for n, name in enumerate(names)]


def block(address, size, state="active_allocated", requested=None, stack=()):
    return {
        "address": address,
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": list(stack),
    }


def segment(device, blocks, pool=(0, 0), expandable=False, stream=0):
    active = [b for b in blocks if b["state"] != "inactive"]
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in active if b["state"] == "active_allocated"),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def entry(action, addr, size, time, stack=(), **more):
    key = "device_free" if action == "oom" else "addr"
    return {
        "action": action,
        key: addr,
        "size": size,
        "stream": 0,
        "time_us": time,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": list(stack),
        **more,
    }


def rich():
    """Two devices, expandable, pools, annotations, an out-of-memory entry without an address."""
    forward, backward = frames("linear", "forward", "main"), frames("backward", "main")
    base = 0x7F0000000000
    one = [
        block(base, 2 * MIB, stack=forward),
        block(base + 2 * MIB, MIB, "inactive"),
        block(base + 3 * MIB, 5 * MIB, "active_pending_free", requested=5 * MIB - 100, stack=backward),
    ]
    two = [block(base + 0x100000000, 4 * MIB, "inactive")]
    trace = [
        entry("segment_map", base, 8 * MIB, 1000, forward),
        entry("alloc", base, 2 * MIB, 1001, forward, pool_id=(0, 7)),
        entry("alloc", base + 2 * MIB, MIB, 1002, backward, forward_frames=forward),
        entry("free_requested", base + 2 * MIB, MIB, 1003),
        entry("free_completed", base + 2 * MIB, MIB, 1004),
        entry("alloc", base + 3 * MIB, 5 * MIB - 100, 1005, backward, category="ACTIVATION"),
        entry("free_requested", base + 3 * MIB, 5 * MIB - 100, 1006),
        entry("oom", 3 * MIB, 64 * MIB, 1007, forward),
        entry("annotate", base, 0, 1008, user_metadata="after the failure"),
    ]
    return {
        "segments": [
            segment(1, two, stream=140000000000001),
            segment(0, one, pool=(0, 7), expandable=True),
        ],
        "device_traces": [trace, []],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.8,
            "expandable_segments": True,
            "roundup_power2_divisions": {"1": 4, "2": 0},
        },
        "external_annotations": [
            {"name": "step", "stage": "START", "device": 0, "time_us": 999},
            {"name": "step", "stage": "END", "device": 0, "time_us": 1009},
        ],
        "host_segments": [{"address": 1, "size": 4096, "allocated": True, "active": True}],
        "host_traces": [],
    }


def minimal():
    """What PyTorch's profiler writes: the fewest fields, addresses of blocks left out."""
    return {
        "segments": [
            {
                "device": 0,
                "address": 4096,
                "total_size": 3072,
                "stream": 0,
                "blocks": [
                    {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []},
                    {"size": 2048, "requested_size": 0, "state": "inactive", "frames": []},
                ],
            }
        ],
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": []}]],
    }


def unshared(value):
    """The same without any object in two places."""
    return copy.deepcopy(value)


def main():
    HERE.mkdir(exist_ok=True)
    snapshot = rich()
    for protocol in range(6):
        (HERE / f"protocol-{protocol}.pickle").write_bytes(pickle.dumps(snapshot, protocol))
    (HERE / "optimized.pickle").write_bytes(pickletools.optimize(pickle.dumps(snapshot, 4)))
    (HERE / "bare-list.pickle").write_bytes(pickle.dumps(snapshot["segments"]))
    (HERE / "minimal.pickle").write_bytes(pickle.dumps(minimal(), 2))
    python = pickle._Pickler  # the pickler in Python, which batches otherwise than the one in C
    with (HERE / "python-pickler.pickle").open("wb") as file:
        python(file, 3).dump(unshared(snapshot))


main()
