"""Which settings of PyTorch's allocator serve a program best, from its memory snapshot or an allocation trace.

Run it as ``python advise.py FILE...``: it prints each setting that needs less memory than the defaults, and the line to paste.
"""

import sys

import lastref

advice = lastref.snapshot.advise(sys.argv[1:])
for file in advice["files"]:
    tried = [one for one in file["tried"] if one["policy"] == "pytorch"]
    [default] = [one for one in tried if not one["settings"]]
    print(f"{file['file']}: {default['peak_reserved_bytes'] >> 20} MiB reserved at the peak by default")
    for one in sorted(tried, key=lambda one: one["peak_reserved_bytes"]):
        if one["peak_reserved_bytes"] < default["peak_reserved_bytes"]:
            print(f"  {one['peak_reserved_bytes'] >> 20} MiB under {one['settings']}")
print(advice["recommended"]["line"] or "keep the defaults")
