"""The memory of one rank in each phase of a run, by the formulas of memory.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from hybrid.checkpoint import SHARD_FILE_BYTES
from inference_v2.runner import LOGIT_BYTES as SAMPLED_LOGIT_BYTES
from recipes.doctor import memory
from recipes.doctor.case import Case, Role
from recipes.doctor.finding import NotExamined
from recipes.doctor.machine import on_cuda, room, total_bytes
from recipes.doctor.memory import ModelShape
from trainers.config import OPSDConfig, PolicyConfig, PPOConfig, RewardModelRef, RewardRecipe, SelfTeacher

PROCESS_BYTES = 500_000_000  # of Python and its libraries; on a GPU, of the CUDA context
Parts = dict[str, int]


@dataclass(frozen=True)
class Phase:
    name: Literal["rollout", "score", "train", "checkpoint"]
    parts: Parts = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Plan:
    """`phases` of a case. Raises NotExamined without the policy's config."""

    def __init__(self, case: Case) -> None:
        self.case, self.config, self.engine = case, case.config, case.config.engine
        self.cuda = on_cuda(self.engine)
        self.shards = self.engine.num_shards(case.nproc)
        self.master, self.compute = (
            getattr(torch, name).itemsize for name in (self.engine.master_dtype, self.engine.compute_dtype)
        )
        self.has_cpu_kernels = not self.cuda and self.engine.rollout.engine.kernels in ("auto", "cpu")

    def phases(self) -> list[Phase]:
        """In the order of a step; those that the recipe does not have are left out."""
        phases = []
        rollout = getattr(self.config, "rollout", None)
        if rollout is not None or (self.config.data.eval is not None and not isinstance(self.config, RewardRecipe)):
            phases.append(Phase("rollout", self.held | self.kept_copy | self._rollout()))
        if scored := self._score():
            phases.append(Phase("score", self.held | self.kept_copy | scored))
        trained = [self._train(self.policy, "policy")]
        if self.critic is not None:
            trained.append(self._train(self.critic, "critic"))
        largest = max(trained, key=lambda parts: sum(parts.values()))
        phases.append(Phase("train", self.held | self.kept_copy | largest))
        phases.append(Phase("checkpoint", self.held | self.kept_copy | self._checkpoint()))
        return phases

    # -- shapes

    @property
    def policy(self) -> ModelShape:
        return self.case.shape(self.case.policy)

    @property
    def critic(self) -> ModelShape | None:
        role = self.case.role("critic")
        return None if role is None else self.case.shape(role)

    # -- what stays

    @cached_property
    def held(self) -> Parts:
        """In every phase, from the first step on."""
        parts = {"process": PROCESS_BYTES}
        parts |= self._trained("policy", self.policy, self.engine.optimizer)
        if isinstance(self.config, PPOConfig) and self.critic is not None:
            offload = self.config.critic.offload and self.cuda
            parts |= {} if offload else self._trained("critic", self.critic, self.config.critic.optimizer)
        if getattr(self.config, "ema_decay", None) is not None:
            parts["average of the policy shards"] = memory.shard_bytes(self.policy.exported, self.shards, 4)
        for role in self.frozen:
            parts |= self._frozen(role)[0]
        return parts | self._vllm()

    def _vllm(self) -> Parts:
        """vLLM is in a process of its own, one for all ranks, and stays up: its share of the whole memory."""
        rollout, total = getattr(self.config, "rollout", None), total_bytes(self.engine)
        if rollout is None or rollout.vllm is None or total is None:
            return {}
        share = rollout.vllm.gpu_memory_utilization * total
        if rollout.vllm.kv_cache_gb is not None:
            share = rollout.vllm.kv_cache_gb * 2**30 + memory.sizes(self.policy.exported) * self.compute
        return {"vLLM": int(share if self.cuda else share / self.case.nproc)}

    def _trained(self, name: str, shape: ModelShape, optimizer: Any) -> Parts:
        parts = {f"{name} shards": memory.held_bytes(shape, self.shards, self.master, self.compute)}
        if self.engine.offload_optimizer and self.cuda:
            return parts
        parts[f"{name} optimizer"] = memory.optimizer_bytes(shape.trained, optimizer, self.shards, self.master)
        if self.engine.offload_optimizer:  # host memory is the device's: the copy that it steps on
            parts[f"{name} host copy"] = memory.shard_bytes(shape.trained, self.shards, self.master)
        return parts

    @property
    def frozen(self) -> list[Role]:
        """Models that are only read, and have weights of their own."""
        teacher = getattr(self.config, "teacher", None)
        live = isinstance(teacher, SelfTeacher) and teacher.weights == "live"
        roles = [r for r in self.case.roles if r.name not in ("policy", "critic")]
        return [role for role in roles if not (live and role.name == "teacher")]

    def _frozen(self, role: Role) -> tuple[Parts, Parts]:
        """What is there in every phase, and what while the model reads."""
        shape, section = self.case.shape(role), self._section(role)
        offload = getattr(section, "offload", False) and self.cuda
        itemsize = getattr(torch, getattr(section, "compute_dtype", None) or self.engine.compute_dtype).itemsize
        averaged = isinstance(section, SelfTeacher) and section.weights == "ema"
        by_engine = not role.scalar and shape.is_registered and getattr(section, "scoring", "auto") != "module"
        shards = {f"{role.name} shards": memory.shard_bytes(shape.parameters, self.shards, 4 if averaged else itemsize)}
        tokens, step = self.micro_batch_tokens, self.engine.rollout.engine.max_step_tokens
        if not by_engine:
            reads = {
                f"{role.name} gathered": memory.gathered_bytes(shape, itemsize, self.engine.zero_stage),
                f"{role.name} forward": memory.forward_bytes(shape.spec, tokens, itemsize),
            }
            return ({}, shards | reads) if offload else (shards, reads)
        reads = {f"{role.name} KV pool": self._pool(shape, itemsize)}
        reads[f"{role.name} forward"] = memory.forward_bytes(shape.spec, step, itemsize)
        copy = {f"{role.name} copy": memory.fused_copy_bytes(shape, itemsize, packs=self.has_cpu_kernels)}
        if not self._fits(copy[f"{role.name} copy"]):
            return shards, reads | {f"{role.name} gathered": memory.gathered_bytes(shape, itemsize, 3)}
        if averaged:
            stays = self.engine.rollout.on_leave == "keep" or (self.engine.rollout.on_leave == "offload" and not self.cuda)
            return (shards | copy, reads) if stays else (shards, reads | copy)
        return ({}, reads | copy) if offload else (copy, reads)

    def _section(self, role: Role) -> Any:
        """Where the recipe speaks of the model."""
        if role.name.startswith("reward"):
            refs = [c for c in getattr(self.config, "rewards", ()) if isinstance(c, RewardModelRef)]
            return refs[[r.name for r in self.case.roles if r.name.startswith("reward")].index(role.name)]
        return getattr(self.config, role.name)

    # -- generation

    @cached_property
    def policy_copy(self) -> Parts:
        """The fused copy; where it does not fit, layers are gathered as they are needed."""
        size = memory.fused_copy_bytes(self.policy, self.compute, packs=self.has_cpu_kernels)
        if self._fits(size):
            return {"policy copy": size}
        return {"policy gathered": memory.gathered_bytes(self.policy, self.compute, 3)}

    @cached_property
    def kept_copy(self) -> Parts:
        """What of generation stays between rollouts."""
        leave = self.engine.rollout.on_leave
        if isinstance(self.config, RewardRecipe) or leave == "free" or (leave == "offload" and self.cuda):
            return {}
        pool = {"policy KV pool": self._pool(self.policy, self.compute)} if leave == "keep" else {}
        return {name: size for name, size in self.policy_copy.items() if name.endswith("copy")} | pool

    def _rollout(self) -> Parts:
        rollout, engine = getattr(self.config, "rollout", None), self.engine.rollout.engine
        if rollout is not None and rollout.backend == "hf":
            return {
                "policy copy": memory.sizes(self.policy.exported) * self.compute,
                "forward": self._forward(engine.max_running),
            }
        if rollout is not None and rollout.backend == "vllm":
            return {}
        outside = memory.sizes(self.policy.of(lambda p: p.layer == memory.OUTSIDE))
        entry = max(outside, memory.sizes(self.policy.largest_layer)) * self.compute
        return self.policy_copy | {
            "policy KV pool": self._pool(self.policy, self.compute),
            "a layer on its way into the copy": entry,
            "sampled logits": min(SAMPLED_LOGIT_BYTES, engine.max_running * self.policy.num_rows * 4),
            "forward": self._forward(engine.max_step_tokens),
        }

    def _forward(self, tokens: int) -> int:
        return memory.forward_bytes(self.policy.spec, tokens, self.compute)

    def _pool(self, shape: ModelShape, itemsize: int) -> int:
        dtype = torch.bfloat16 if itemsize == 2 else torch.float32
        engine = self.engine.rollout.engine
        return memory.kv_pool_bytes(shape.spec, engine, dtype, engine.max_model_len or shape.spec.max_position_embeddings)

    def _fits(self, copy: int) -> bool:
        """As hybrid.modes decides, by the memory that is free now."""
        rollout = self.engine.rollout
        if rollout.gather != "auto":
            return rollout.gather == "full"
        free, _ = room(self.case)
        allowed = rollout.max_copy_bytes if rollout.max_copy_bytes is not None else None if free is None else free // 2
        return allowed is None or copy <= allowed

    # -- the phases

    def _score(self) -> Parts:
        """The scorer that needs most; they read one after the other."""
        reads = [self._frozen(role)[1] for role in self.frozen]
        teacher = getattr(self.config, "teacher", None)
        if isinstance(teacher, SelfTeacher) and teacher.weights == "live":
            pool = {"policy KV pool": self._pool(self.policy, self.compute)}
            reads.append(self.policy_copy | pool | {"forward": self._forward(self.engine.rollout.engine.max_step_tokens)})
        if self.critic is not None:
            gathered = memory.gathered_bytes(self.critic, self.compute, self.engine.zero_stage)
            forward = memory.forward_bytes(self.critic.spec, self.micro_batch_tokens, self.compute)
            reads.append({"critic gathered": gathered, "critic forward": forward})
        if not reads:
            return {}
        return max(reads, key=lambda parts: sum(parts.values())) | self.hidden_states

    @cached_property
    def hidden_states(self) -> Parts:
        """The teacher's, of a step's responses: they wait in host memory."""
        role = self.case.role("teacher")
        rollout = getattr(self.config, "rollout", None)
        if role is None or self.cuda or rollout is None:
            return {}
        width = self.case.model(role).hf_config.get_text_config().hidden_size
        responses = -(-rollout.prompts_per_step * rollout.samples_per_prompt // self.case.nproc)
        return {"teacher's hidden states": responses * rollout.sampling.max_new_tokens * width * self.compute}

    def _train(self, shape: ModelShape, name: str) -> Parts:
        engine, tokens = self.engine, self.micro_batch_tokens
        activations = memory.activation_bytes(
            shape.spec,
            tokens,
            self.compute,
            fused=self.has_cpu_kernels and engine.fused_layers and shape.is_registered,
            checkpointing=engine.activation_checkpointing,
        )
        parts = {
            f"{name} gradients": memory.shard_bytes(shape.trained, self.shards, self.master),
            f"{name} gathered": memory.gathered_bytes(shape, self.compute, engine.zero_stage),
            f"{name} gradients under way": memory.reduced_bytes(shape, self.compute),
            f"{name} activations": activations,
            f"{name} logits": memory.logit_bytes(shape.num_rows, engine.loss_chunk_tokens, tokens, self._logit_tensors(name)),
        }
        role = self.case.role("teacher")
        if name == "policy" and role is not None and "teacher copy" not in self.held:
            teacher = self.case.shape(role)
            parts["teacher's head"] = teacher.num_rows * teacher.spec.hidden_size * self.compute
        return parts | (self.hidden_states if name == "policy" else {})

    def _logit_tensors(self, name: str) -> int:
        """[chunk, rows] tensors that the loss has at once: kernels compute cross-entropy and plain KLs in place."""
        config = self.config
        if name == "critic" or isinstance(config, RewardRecipe):
            return 1
        distil = getattr(config, "loss", None) if isinstance(config, OPSDConfig) else getattr(config, "distill", None)
        plain = not isinstance(config, PolicyConfig) or config.loss.entropy == 0
        if isinstance(config, OPSDConfig) or getattr(config, "teacher", None) is not None:
            assert distil is not None
            plain = (
                plain
                and distil.divergence in ("forward_kl", "reverse_kl")
                and distil.top_k is None
                and distil.clip_element is None
            )
        return 3 if self.has_cpu_kernels and plain else 8

    def _checkpoint(self) -> Parts:
        """A file of shards as it is serialised, and at the end the largest weight, whole, for the export."""
        return {
            "a file of shards": 2 * SHARD_FILE_BYTES,
            "a whole weight": 2 * max(p.size for p in self.policy.parameters) * self.master,
        }

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Of the largest micro-batch: no sequence is cut, and a rank has no more than its share of a step. Where the data cannot
        be read, what train.micro_batch_tokens allows."""
        config = self.config
        try:
            prompts = self.case.prompts.prompts
        except NotExamined:
            return config.train.micro_batch_tokens
        rollout = getattr(config, "rollout", None)
        given = max(max(len(p.response_ids or ()), len(p.rejected_ids or ())) for p in prompts)
        response = given if rollout is None else rollout.sampling.max_new_tokens
        longest = max(len(p.ids) for p in prompts) + response
        responses = config.train.batch_size if rollout is None else rollout.prompts_per_step * rollout.samples_per_prompt
        responses *= 2 if isinstance(config, RewardRecipe) else 1
        parts = config.updates.minibatches if isinstance(config, PolicyConfig) else 1
        share = -(-responses // (parts * self.case.nproc))
        return min(max(config.train.micro_batch_tokens, longest), share * longest)
