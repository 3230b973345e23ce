"""Time until a new process has listed all blocks of a store in a local folder.

Files of no content stand for the blocks, as a listing does not look into them. They are
made in a new folder beside others, and removed.

    python benchmarks/storage_list.py --blocks 1000000 --json FILE
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time

from common import make_parser, quartiles, show_machine, write_figures
from jaxkv.transfer.storage import LocalStore, ObjectFormat, StorageIO

OBJECTS = ObjectFormat(b"benchmark", "u8[1]", 1)


def make_files(root: str, num_blocks: int) -> None:
    folder = f"{root}/{OBJECTS.folder}"
    for number in range(256):
        os.makedirs(f"{folder}/{number:02x}")
    for number in range(num_blocks):
        key = hashlib.sha256(number.to_bytes(8, "little")).digest()
        os.close(os.open(f"{root}/{OBJECTS.name(key)}", os.O_CREAT | os.O_WRONLY))


def list_all(root: str, num_blocks: int) -> tuple[float, float]:
    """Return the seconds until the first page, and until the last."""
    storage = StorageIO(LocalStore(root), OBJECTS)
    start_s = time.perf_counter()
    first_s, num_found, ended = 0.0, 0, None
    storage.list_all()
    while ended is None:
        pages, ended = storage.take_pages(1 << 15)
        num_found += sum(len(page.keys) for page in pages)
        if num_found and not first_s:
            first_s = time.perf_counter() - start_s
        if not pages:
            time.sleep(0.001)  # As between two steps of a scheduler.
    all_s = time.perf_counter() - start_s
    storage.close()
    if num_found != num_blocks:
        raise SystemExit(f"{num_found} of {num_blocks} blocks were found.")
    return first_s, all_s


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", help="where to make them (default: temporary files)"
    )
    args = parser.parse_args()
    root = tempfile.mkdtemp(prefix="jaxkv-list-", dir=args.folder)
    try:
        make_files(root, args.blocks)
        times = [list_all(root, args.blocks) for _ in range(args.rounds)]
    finally:
        shutil.rmtree(root)
    figures = {
        "machine": show_machine(),
        "num_blocks": args.blocks,
        "rounds": args.rounds,
        "first_page_s": quartiles([first for first, _ in times]),
        "all_s": quartiles([last for _, last in times]),
    }
    print(json.dumps(figures, indent=1))
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
