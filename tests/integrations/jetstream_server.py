"""JetStream's own gRPC server over a real MaxEngine, in a process of its own.

    python -m tests.integrations.jetstream_server CACHE FOLDER

CACHE is "none" or "jaxkv". FOLDER is for the tokenizer. When the server is up it prints
"PORT <number>". Then it reads words, one a line, and after each prints "STATE <JSON>":
how often a chunk was prefilled, and what jaxkv's cache has counted. The words are

    state    only for the state
    flush    to wait for the saves of the cache
    break    to have every call of the cache fail inside from then on

The end of its input ends it.
"""

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

from jaxkv import Extras
from jaxkv.integrations.jetstream import PrefixCache
from jaxkv.integrations.maxtext import prefill_cache_like
from jaxkv.integrations.maxtext_guards import guard_chunked_prefill

ROOM_BYTES = 10_000_000


def make_config(folder):
    """Return the settings of JetStream's server, and the engines that it has made."""
    from jetstream.core import config_lib
    from maxtext.configs import pyconfig
    from maxtext.inference.maxengine import maxengine
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    from tests.integrations import test_maxtext_engine as tiny

    guard_chunked_prefill()
    engines = []

    class Engine(maxengine.MaxEngine):
        """Has random weights, and counts."""

        num_prefills = 0

        def load_params(self, *args, **named):
            return super().load_params(params=tiny.random_params(self))

        def prefill(self, **named):
            self.num_prefills += 1
            return super().prefill(**named)

        def free_resource(self, slot):
            """Free nothing, like the base class of JetStream's engines.

            Without Google Cloud, MaxText's engine has another base class.
            """

    def make_engine(devices):
        maxtext = SimpleNamespace(
            initialize=pyconfig.initialize,
            maxengine=SimpleNamespace(MaxEngine=Engine),
            base=os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml"),
        )
        engine = tiny.make_engine(
            maxtext,
            folder,
            tokenizer_path=str(folder / "tokenizer"),
            tokenizer_type="huggingface",
        )
        engines.append(engine)
        return engine

    config = config_lib.ServerConfig(
        interleaved_slices=("cpu=1",), interleaved_engine_create_fns=(make_engine,)
    )
    return config, engines


def make_tokenizer(folder):
    """Write a tokenizer: the server needs one although prompts come as tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"{number} ": number for number in range(254)}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    vocabulary |= {"<s>": 254, "</s>": 255}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def break_cache(cache):
    """Make every call of a cache fail inside."""

    def fail(*args, **named):
        raise RuntimeError("broken for a test")

    cache.store._keys = fail


def start(which, folder):
    """Start the server as its users do."""
    import grpc
    from jetstream.core import config_lib, prefix_cache, server_lib

    caches = []

    def make_cache(hbm_bytes, dram_bytes):
        """As docs/jetstream.md has it."""
        like = prefill_cache_like(engines[0])
        size = {"block_size": 8, "host_bytes": dram_bytes}
        caches.append(PrefixCache(like, extras=Extras(), **size))
        return caches[0]

    if which == "jaxkv":
        prefix_cache.PrefixCache = make_cache
    server_lib._HOST = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config, engines = make_config(folder)
    caching = config_lib.PrefixCachingConfig(ROOM_BYTES, ROOM_BYTES)
    server = server_lib.run(
        port=port,
        config=config,
        devices=[None],
        credentials=grpc.local_server_credentials(),
        prefix_caching_config=None if which == "none" else caching,
    )
    return server, port, caches[0] if caches else None, engines


def main():
    """Serve."""
    which, folder = sys.argv[1], Path(sys.argv[2])
    # JetStream writes to it, too.
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    make_tokenizer(folder / "tokenizer")
    server, port, cache, engines = start(which, folder)
    print(f"PORT {port}", file=answers, flush=True)
    for line in sys.stdin:
        state = {"prefills": sum(engine.num_prefills for engine in engines)}
        if cache is not None:
            match line.strip():
                case "flush":
                    cache.store.flush()
                case "break":
                    break_cache(cache)
            state |= {
                "hit_tokens": cache.store.stats.num_host_hit_tokens,
                "errors": dict(cache.errors),
            }
        print("STATE " + json.dumps(state), file=answers, flush=True)
    del server
    os._exit(0)  # JetStream's threads would wait for more.


if __name__ == "__main__":
    main()
