"""Option 1 of docs/integrate.md: an engine with a cache per prompt, and `PrefixStore`.

toy_model.py stands for your model. Prompts share the blocks of their common prefix.
"""

from toy_model import BLOCK, answer, new_cache, run

from jaxkv import Extras, Namespace
from jaxkv.integrations.prefix_store import PrefixStore

# Everything that the bytes of a block depend on, apart from the tokens.
NAMESPACE = Namespace(
    model="toy",
    weights_epoch="v1",
    kv_dtype="float32",
    layout="tokens, features",
    block_size=BLOCK,
)


class Engine:
    """Serves one prompt at a time, each in arrays of its own."""

    def __init__(self, host_blocks):
        # The template gives the shapes and the place of the arrays; it is not kept.
        self.store = PrefixStore(
            new_cache(), namespace=NAMESPACE, num_host_blocks=host_blocks
        )
        self.store.warm_up()  # compile before the first user comes

    def prefill(self, prompt, extras, epoch):
        """Return the KV of all tokens but the last, and how many the host had."""
        hit = self.store.load(prompt[:-1], extras, epoch=epoch)  # waits for the bytes
        cache, num_loaded = new_cache(), 0
        if hit is not None:
            cache, num_loaded = hit.kv, hit.num_tokens
        for position in range(num_loaded, len(prompt) - 1):
            cache, _ = run(cache, position, prompt[position])
        return cache, num_loaded

    def serve(self, prompt, num_new, tenant):
        """Return the new tokens, and how many tokens came from the host."""
        extras = Extras(cache_salt=tenant)  # tenants never find each other's blocks
        epoch = self.store.epoch  # before the weights are read, which may change
        cache, num_loaded = self.prefill(prompt, extras, epoch)
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_new:
            cache, new = run(cache, len(tokens) - 1, tokens[-1])
            tokens.append(new)
        # Returns at once, and `cache` may be donated then. The KV of the last token
        # was never computed.
        self.store.save(tokens, cache, len(tokens) - 1, extras, epoch=epoch)
        return tokens[len(prompt) :], num_loaded

    def close(self):
        """Wait for the saves in flight, and end the store's thread."""
        self.store.close()


if __name__ == "__main__":
    engine, all_same = Engine(host_blocks=64), True
    prompt = [3 * n % 97 for n in range(24)]
    for turn in ("first question", "next question", "another user", "another tenant"):
        if turn == "another user":
            prompt = [*prompt[:20], 11, 12, 13]  # the same system prompt
        tenant = "bob" if turn == "another tenant" else "alice"
        tokens, num_loaded = engine.serve(prompt, 6, tenant)
        engine.store.flush()  # for this output; an engine does not wait
        all_same &= tokens == answer(prompt, 6)
        print(f"{turn}: {num_loaded} of {len(prompt)} tokens from the host")
        prompt = [*prompt, *tokens, 14, 15]
    engine.close()
    print(f"tokens are identical: {all_same}")
