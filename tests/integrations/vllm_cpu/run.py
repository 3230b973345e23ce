"""Runs a scenario in a real engine, with jaxkv or without a connector.

    python -m vllm_cpu.run SCENARIOS FOLDER OPTIONS

SCENARIOS are names with plus signs between them. They run one after the other, each
from empty tiers. FOLDER has the models. OPTIONS is JSON: "model", the keys of "extra",
null for no connector, and "engine", arguments of `LLM`. The output has a line of JSON
for each scenario: the tokens and log-probabilities of each request, and what was
counted.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from .ray_nodes import has_ray, ray_cluster

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 16, 48, 400
_METRICS = ("prefix", "kv", "preempt", "spec_decode")
NUM_USERS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 160, 10


def engine_arguments(folder, options):
    arguments = dict(
        model=str(folder / options["model"]),
        # "auto" would halve float32.
        dtype=options["model"].rpartition("-")[2],
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=options.get("num_blocks", NUM_BLOCKS),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        async_scheduling=False,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    if options.get("extra") is not None:
        arguments["kv_transfer_config"] = transfer_config(options["extra"])
    return arguments | options.get("engine", {})


def transfer_config(extra):
    """Return what ``--kv-transfer-config`` takes."""
    return dict(
        kv_connector="TPUOffloadConnector",
        kv_connector_module_path="jaxkv.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"num_cpu_blocks": NUM_HOST_BLOCKS} | extra,
    )


class Run:
    """A real engine and what it answered."""

    def __init__(self, folder, options):
        from vllm import LLM

        self.folder = folder
        self.options = options
        self.llm = LLM(**engine_arguments(folder, options))
        self.answers = []
        self.has_connector = options.get("extra") is not None
        # Preemptions of vLLM, and restored tokens, in each part of a run.
        self.preemptions, self.restored = [], []
        self.counted = {}
        # Further results of a scenario, by name.
        self.observed = {}

    def ask(self, prompts, salt=None, lora=None, num_tokens=None, params=None):
        """Answer prompts in one batch; return the tokens of the answers."""
        from vllm import SamplingParams

        # tpu-inference 0.32 gives some drafts' log-probabilities to other tokens.
        has_drafts = self.options.get("engine", {}).get("speculative_config")
        sampling = [
            SamplingParams(
                max_tokens=number,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprobs=None if has_drafts else 2,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            for number in num_tokens or [ANSWER_TOKENS] * len(prompts)
        ]
        fields = {} if salt is None else {"cache_salt": salt}
        inputs = [{"prompt_token_ids": prompt, **fields} for prompt in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        answers = []
        for output in outputs:
            (answer,) = output.outputs
            tokens = list(answer.token_ids)
            pairs = list(zip(answer.logprobs or (), tokens, strict=not has_drafts))
            self.answers.append(
                {
                    "tokens": tokens,
                    "logprobs": [likely[token].logprob for likely, token in pairs],
                    # The second likeliest token, with its log-probability.
                    "rivals": [
                        max(
                            (rival.logprob, number)
                            for number, rival in likely.items()
                            if number != token
                        )
                        for likely, token in pairs
                    ],
                    "cached": output.num_cached_tokens,
                }
            )
            answers.append(tokens)
        return answers

    @property
    def core(self):
        """The engine's core, where it is in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self):
        """tpu-inference's worker, where it is in this process."""
        return self.core.model_executor.driver_worker.worker

    def evict(self):
        """Evict all blocks of the device, without a call to the host."""
        self.settle()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert type(pool).reset_prefix_cache(pool)

    def settle(self):
        """Step until no store is in flight."""
        while self.has_connector and self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def count(self):
        """Append the preemptions and the restored tokens since the last call."""
        restored = self.llm.collective_rpc(_num_restored)
        for counts, total in (
            (self.preemptions, self.metrics()["vllm:num_preemptions"]),
            (self.restored, min(restored)),
        ):
            counts.append(total - sum(counts))

    def metrics(self):
        """Return vLLM's own metrics, counted from this scenario's beginning."""
        return {
            name: value - self.counted.get(name, 0)
            for name, value in self.all_metrics().items()
        }

    def all_metrics(self):
        """Return vLLM's own metrics."""
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value")
            and any(part in metric.name for part in _METRICS)
        }

    def result(self):
        return {
            "answers": self.answers,
            "metrics": self.metrics(),
            "preemptions": self.preemptions,
            "restored": self.restored,
            "observed": self.observed,
        }

    def forget(self):
        """Empty the tiers, and begin to count anew."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=self.has_connector)
        self.answers, self.preemptions, self.restored = [], [], []
        self.counted = self.all_metrics()


def _num_restored(worker):
    update = worker.model_runner.persistent_batch_manager.update_states
    return getattr(update, "num_restored", 0)


def prompts_of(seed):
    """The first questions of all users."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, PROMPT_TOKENS).tolist() for _ in range(NUM_USERS)]


def conversations(run):
    """Three turns of conversations that do not all fit on the device."""
    rng = np.random.default_rng(1)
    prompts = prompts_of(0)
    for _ in range(3):
        answers = run.ask(prompts)
        prompts = [
            [*prompt, *answer, *rng.integers(0, 256, 9).tolist()]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def under_pressure(seed, ask, is_fixed=False, num_users=20):
    """Serve three turns of users whose requests displace and preempt one another.

    With `is_fixed`, prompts do not depend on answers.
    """
    rng = np.random.default_rng(seed)
    users = range(num_users)
    prompts = [rng.integers(0, 256, rng.integers(100, 220)).tolist() for _ in users]
    for _ in range(3):
        num_tokens = rng.integers(10, 60, len(users)).tolist()
        answers = ask(prompts, num_tokens)
        if is_fixed:
            answers = [[0] * number for number in num_tokens]
        prompts = [
            [*prompt, *answer, *rng.integers(0, 256, 9).tolist()]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def pressure(run):
    """The same for each of "seeds" seeds."""
    for seed in range(run.options["seeds"]):
        under_pressure(
            seed,
            lambda prompts, num_tokens: run.ask(prompts, num_tokens=num_tokens),
            run.options.get("is_fixed", False),
        )
        run.count()


def spoilt_pressure(run):
    """The same for each of "rounds": the faults of each host from then on, and seeds.

    It records the tokens that each round hits on the hosts.
    """
    hits = run.observed["hits"] = []
    for faults, seeds in run.options["rounds"]:
        if run.answers:
            run.settle()
            assert run.llm.reset_prefix_cache(reset_connector=run.has_connector)
        run.llm.collective_rpc(_spoil_hosts, args=(faults,))
        for seed in seeds:
            under_pressure(
                seed,
                lambda prompts, num_tokens: run.ask(prompts, num_tokens=num_tokens),
                num_users=run.options["users"],
            )
            run.count()
        total = run.metrics().get("vllm:external_prefix_cache_hits", 0)
        hits.append(total - sum(hits))


def _spoil_hosts(worker, faults):
    import jax

    from vllm_cpu.plugin import spoil

    spoil(faults[jax.process_index()])


def interruptions(run):
    """Running requests that are preempted while their last results are in flight."""
    from vllm import SamplingParams

    engine = run.llm.llm_engine
    sampling = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, detokenize=False
    )
    prompts = prompts_of(0)
    for user, prompt in enumerate(prompts):
        engine.add_request(str(user), {"prompt_token_ids": prompt}, sampling)
    done = {}
    num_steps = 0
    while len(done) < len(prompts):
        done |= {
            int(output.request_id): list(output.outputs[0].token_ids)
            for output in engine.step()
            if output.finished
        }
        num_steps += 1
        if num_steps % 25 == 0 and run.options["interrupts"]:
            # It raises if blocks are still held.
            assert engine.reset_prefix_cache(reset_running_requests=True)
    run.answers += [{"tokens": done[user], "logprobs": []} for user in sorted(done)]
    run.count()


def salts(run):
    """The same prompts under two salts and none."""
    for salt in (None, "one", "two", "one"):
        run.ask(prompts_of(0)[:3], salt=salt)
        run.ask(prompts_of(1))  # Evicts the others from the device.


def prompt_logprobs(run):
    """Prompts under pressure, half of them with log-probabilities.

    Memory that tpu-inference does not initialize has token ids below 0.
    """
    from tpu_inference.runner import input_batch
    from vllm import SamplingParams

    def empty(shape, dtype=float):
        return np.full(shape, -7, dtype)

    input_batch.np = SimpleNamespace(**vars(np) | {"empty": empty})
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, 120).tolist() for _ in range(4)]
    found = run.observed["prompt logprobs"] = []
    for _ in range(2):
        asked = [
            (
                texts[user % 4] + rng.integers(0, 256, rng.integers(9, 90)).tolist(),
                SamplingParams(
                    max_tokens=int(rng.integers(1, 50)),
                    temperature=int(user % 8 == 1),  # 0 refuses n=2.
                    top_k=1,
                    n=1 + (user % 8 == 1),
                    ignore_eos=True,
                    prompt_logprobs=1 if user % 2 else None,
                    # A cached prefix then has none to return, and ends vLLM alone.
                    skip_reading_prefix_cache=(
                        False if run.has_connector and user % 16 == 3 else None
                    ),
                ),
            )
            for user in range(32)
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        params = [sampling for _, sampling in asked]
        for output in run.llm.generate(inputs, params, use_tqdm=False):
            for answer in output.outputs:
                run.answers.append({"tokens": list(answer.token_ids), "logprobs": []})
            pairs = zip(
                output.prompt_token_ids, output.prompt_logprobs or (), strict=False
            )
            rows = [row and row[token].logprob for token, row in pairs]
            found.append([rows, len(output.prompt_logprobs or ())])
    run.count()


def adapters(run):
    """The same prompts with two adapters and none."""
    from vllm.lora.request import LoRARequest

    loras = [
        LoRARequest(f"adapter {number}", number, str(run.folder / f"adapter{number}"))
        for number in (1, 2)
    ]
    for lora in (None, *loras, None, *loras):
        run.ask(prompts_of(0)[:3], lora=lora)
        run.ask(prompts_of(1), lora=lora)


def aborts(run):
    """Requests that are aborted while their blocks are stored and loaded."""
    from vllm import SamplingParams

    engine = run.llm.llm_engine
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    run.ask(prompts_of(0))
    for number in range(4):
        for user, prompt in enumerate(prompts_of(0)):
            inputs = {"prompt_token_ids": [*prompt, number]}
            engine.add_request(f"{number}-{user}", inputs, sampling)
        for _ in range(1 + number):
            engine.step()
        engine.abort_request([f"{number}-{user}" for user in (0, 2, 4)])
        while engine.has_unfinished_requests():
            engine.step()
    run.ask(prompts_of(0))
    run.settle()
    if not hasattr(run.core.scheduler, "kv_cache_manager"):
        # Ranks have one each, in other processes. It refuses while a block is held.
        assert run.llm.reset_prefix_cache()
        return
    pool = run.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def returns(run):
    """Twelve users who come back in another order each time, then after resets.

    It records the tokens hit: by returning users, after a reset of the device, and
    after a reset of all tiers.
    """
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 256, 100).tolist() for _ in range(12)]
    for _ in range(5):
        order = rng.permutation(len(prompts)).tolist()
        answers = dict(zip(order, run.ask([prompts[i] for i in order]), strict=True))
        prompts = [
            [*prompt, *answers[user], *rng.integers(0, 256, 9).tolist()]
            for user, prompt in enumerate(prompts)
        ]
    hits = run.observed["hits"] = [sum(answer["cached"] for answer in run.answers)]
    for options in ({}, {"reset_connector": run.has_connector}):
        run.settle()
        assert run.llm.reset_prefix_cache(**options)
        run.ask([prompt[:-9] for prompt in prompts])
        hits.append(sum(answer["cached"] for answer in run.answers[-len(prompts) :]))


def resets(run):
    """Resets, and pools made anew, with the same weights: answers stay the same."""
    prompts = prompts_of(0)
    first = run.ask(prompts)
    cached = []

    def again(*calls):
        for call in calls:
            assert call() in (None, True)
        assert run.ask(prompts) == first
        cached.append(sum(answer["cached"] for answer in run.answers[-NUM_USERS:]))

    reset = run.llm.reset_prefix_cache
    worker = run.worker
    again(run.evict)
    again(reset)
    again(run.evict)
    again(lambda: reset(reset_connector=True))
    again(run.evict)
    again(run.evict, worker.delete_kv_cache, worker.reinitialize_kv_cache)
    again(run.evict)
    again(run.evict, worker.start_weight_update, worker.finish_weight_update)
    again(run.evict)
    assert not run.has_connector or [bool(num) for num in cached] == [
        True,
        *(False, True) * 4,
    ], cached


def new_weights(run):
    """Weights that change in every way: answers must be the new model's."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    prompts, worker = prompts_of(0), run.worker
    runner = worker.model_runner
    answers = [run.ask(prompts)]
    run.observed["resets"] = []

    def reset():
        run.observed["resets"].append(run.llm.reset_prefix_cache())
        run.evict()

    def rolled(leaf):
        return jnp.roll(leaf, 1, 0) if leaf.ndim >= 2 else leaf

    def replace():
        runner.state = jax.tree.map(rolled, runner.state)
        worker.refresh_model_state_leaves()

    def write():
        is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
        for variable in jax.tree.leaves(worker.get_weights_state(), is_leaf=is_leaf):
            variable.value = rolled(variable.value)
        worker.refresh_model_state_leaves()

    def update(**options):
        worker.start_weight_update(**options)
        write()
        worker.update_weights({})
        worker.finish_weight_update()

    for calls in (
        (reset, update),
        (reset, write),
        (write, reset),
        # The device's blocks are evicted without a call to the host.
        (run.evict, replace),
        (run.evict, lambda: update(free_kv_cache=False)),
    ):
        for call in calls:
            call()
        answers.append(run.ask(prompts))
    assert run.has_connector or all(map(list.__ne__, answers, answers[1:]))


def new_adapters(run):
    """An adapter that is reloaded in every way: answers must follow its weights.

    They are compared with computed answers, under a salt that is used once.
    """
    import os
    import shutil

    from vllm.lora.request import LoRARequest

    prompts, path = prompts_of(0)[:3], run.folder / "policy"
    engine = run.llm.llm_engine
    shutil.copytree(run.folder / "adapter1", path)
    lora = LoRARequest("policy", 1, str(path))
    in_place = LoRARequest("policy", 1, str(path), load_inplace=True)
    observed, wrong = run.observed, []
    observed["cached"], observed["wrong"] = [], wrong

    def rewrite(number):
        """Write other bytes, of the same size and with the same time."""
        target = path / "adapter_model.safetensors"
        status = target.stat()
        source = run.folder / f"adapter{number}" / target.name
        target.write_bytes(source.read_bytes())
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def compare(name, lora=lora):
        run.evict()
        tokens = run.ask(prompts, lora=lora)
        observed["cached"].append(sum(answer["cached"] for answer in run.answers[-3:]))
        if tokens != run.ask(prompts, lora=lora, salt=name):
            wrong.append(name)
        return tokens

    first = compare("first")
    compare("unchanged")
    rewrite(2)
    assert compare("rewritten, not loaded") == first
    engine.add_lora(in_place)
    second = compare("loaded in place")
    assert second != first
    compare("unchanged since")
    rewrite(1)
    assert compare("loaded by the request", in_place) == first
    engine.remove_lora(1)
    rewrite(2)
    assert compare("removed and added") == second
    taken_id = LoRARequest("other", 1, str(run.folder / "adapter1"))
    assert compare("an id that is taken", taken_id) == second


def drafts(run):
    """Conversations; it records the drafts that follow each token sequence."""
    take, requests = run.worker.take_draft_token_ids, run.core.scheduler.requests
    drafts_after = run.observed["drafts"] = {}

    def listen():
        made = take()
        for name, tokens in zip(made.req_ids, made.draft_token_ids, strict=False):
            request = requests.get(name)
            if request is not None and request.num_output_tokens:
                drafts_after[str(list(request.all_token_ids))] = list(tokens)
        return made

    run.worker.take_draft_token_ids = listen
    conversations(run)


def acceptance(run):
    """Pressure; it records how many drafts each turn makes and accepts."""
    turns = run.observed["turns"] = []

    def ask(prompts, num_tokens):
        before = run.metrics()
        answers = run.ask(prompts, num_tokens=num_tokens)
        after = run.metrics()
        names = ("num_draft_tokens", "num_accepted_tokens")
        names = [f"vllm:spec_decode_{name}" for name in names]
        turns.append([after[name] - before.get(name, 0) for name in names])
        return answers

    for seed in range(run.options["seeds"]):
        under_pressure(seed, ask, is_fixed=True)


def wishes(run):
    """Limits and retention that a request asks for, and the localities of events."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    limited, loaded, kept, *_ = prompts_of(0)
    engine, connector = run.llm.llm_engine, run.core.scheduler.connector
    observed = run.observed
    observed["localities"] = []
    take_events = connector.take_events

    def listen():
        for event in take_events():
            pair = [getattr(event, "medium", None), getattr(event, "locality", None)]
            if pair not in observed["localities"]:
                observed["localities"].append(pair)
            yield event

    connector.take_events = listen

    def cached(prompt, **params):
        run.evict()
        run.ask([prompt], params=params)
        return run.answers[-1]["cached"]

    cached(limited, max_offload_tokens=32)
    observed["of a limited store"] = cached(limited)
    cached(loaded)
    observed["of a limited load"] = cached(loaded, max_load_tokens=64)
    run.settle()
    action = KvHintAction("one", "kv.retain", "1.0", {"priority": 80, "ttl_s": 600})
    engine.add_request(
        "kept",
        {"prompt_token_ids": kept},
        SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        kv_hints=KvHintsEnvelope("0.1", "one", [action]),
    )
    while engine.has_unfinished_requests():
        engine.step()
    for seed in (1, 2):  # Evicts all else from the host.
        run.ask(prompts_of(seed))
    observed["of what is kept"] = cached(kept)
    observed["of others"] = cached(loaded)


def frees(run):
    """A request that waits for blocks of an ended one that a store still reads."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from jaxkv.scheduling.protocol import NO_REPORTS

    first, second, *_ = prompts_of(0)
    half = get_kv_transfer_group()._worker
    poll, half.poll = half.poll, lambda: NO_REPORTS  # No store ends.
    run.ask([first])
    engine, connector = run.llm.llm_engine, run.core.scheduler.connector
    has_pending, waits = connector.has_pending_block_frees, []

    def count():
        waits.append(has_pending())
        return waits[-1]

    connector.has_pending_block_frees = count
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    engine.add_request("second", {"prompt_token_ids": second}, sampling)
    for _ in range(80):
        engine.step()
    run.observed["waits"] = sum(waits)
    run.observed["is waiting"] = engine.has_unfinished_requests()
    half.poll = poll
    while engine.has_unfinished_requests():
        engine.step()
    run.count()


def main():
    names, folder, options = sys.argv[1:]
    with ray_cluster():
        run = Run(Path(folder), json.loads(options))
        for number, name in enumerate(names.split("+")):
            if number:
                run.forget()
            globals()[name](run)
            print("\nRESULT " + json.dumps(run.result()), flush=True)
        if has_ray():  # Workers end before the cluster.
            run.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
