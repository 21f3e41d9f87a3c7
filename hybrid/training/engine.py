"""TrainingEngine: DeepSpeed's loop of forward, backward and step, over any module sharded by FSDP2."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import checkpointing, in_flight, sharding
from hybrid.mesh import Mesh, in_text
from hybrid.optim.gradients import in_words
from hybrid.optim.update import Stepped, Update
from hybrid.policy import PlainCall
from hybrid.sharding import outside_inference_mode
from hybrid.training import checkpoints, weights
from hybrid.training.background import Background
from hybrid.training.compression import compress
from hybrid.training.config.top import Effect, TrainingConfig
from hybrid.training.eigenvalue import EigenvalueMonitor
from hybrid.training.facts import EngineFacts
from hybrid.training.generation import Rollouts
from hybrid.training.meters import Meters, tokens_in
from hybrid.training.scalars import open_scalars
from hybrid.training.usage import Usage

FOREIGN = "gradients are there that engine.backward did not make; use engine.backward(loss) in place of loss.backward()"


class TrainingEngine(EngineFacts):
    """One sharded module with its optimizer. All verbs are collective: every rank calls them in the same order.

    `engine(...)` is the module's forward; `engine.backward(loss)` adds gradients, of the mean over ranks and over the
    backwards of a step; `engine.step()` takes an optimizer step at each step's last backward and does nothing before. What
    the engine does not know is looked up in `module`. Weights may be changed in place whenever no training forward waits for
    its backward, nor a backward for the rest of its step: in between, some are gathered, a change of those is lost, and the next
    step or save says so (not of layers that zero_hpz_partition_size keeps).
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainingConfig,
        mesh: Mesh,
        update: Update,
        *,
        root: nn.Module | None = None,
        rollouts: Rollouts | None = None,
        eigenvalues: EigenvalueMonitor | None = None,
        effects: Sequence[Effect] = (),
        log: logging.Logger,
    ) -> None:
        """root: what is called to run the module, if not itself (it gathers what the module's own layers do not)."""
        super().__init__(module, config, mesh, update, Meters(module, config, mesh, log), root=root, effects=effects)
        self._rollouts = rollouts
        if rollouts is not None:  # scripts call it there; transformers' own would run a module in pieces
            module.__dict__["generate"] = self.generate
        self._own_zero_grad()
        self._scalars = open_scalars(config, mesh.rank)
        self._eigenvalues = eigenvalues
        section = config.gradient_compression
        self._compressed = compress(self.root, section.ratio, error_feedback=section.error_feedback) if section.ratio < 1 else []
        self._waiting = 0  # backwards whose gradients wait for a step
        self._micro = 0  # calls of step in this accumulation
        self._is_synced = True  # whether the last backward reduced what it had
        self._usage = Usage(self.root, update.parameters, mesh)
        self._log = log
        self._last_loss: Tensor | None = None  # of this rank's last backward
        self._background = Background()  # of asynchronous saves
        self._boundary: bool | None = None  # as the caller says, else by counting

    # -- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on this rank's samples; what an exception in it left half done is dropped."""
        if torch.is_inference_mode_enabled():  # what is gathered in it could not be trained afterwards
            with outside_inference_mode(), torch.no_grad():
                return self.forward(*args, **kwargs)
        training = torch.is_grad_enabled() and self.optimizer is not None
        if training:
            self._announce(self.is_gradient_accumulation_boundary())
        else:
            self._usage.note_altered()  # after a training forward without a backward; else nothing is gathered
        autocast = self.config.torch_autocast
        context = torch.autocast(self.mesh.device.type, getattr(torch, autocast.dtype)) if autocast.enabled else nullcontext()
        if training:
            self._meters.before_forward(self.global_steps + 1)
        tokens = tokens_in(args, kwargs) if training else 0
        guarded = self._mended_on_error(drop=training)
        with self._meters.phase("forward", tokens=tokens), guarded, self._checkpointing(), context:
            result = self.root(*args, **kwargs) if self._rollouts is None else self.root(PlainCall(args, kwargs))
        if not training:
            sharding.reshard(self.root)
        return result

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """transformers' `generate` under the weights as they are, by the fused engine (hybrid_engine.enabled): [B * n, L]; see
        Rollouts.generate. Raises RuntimeError without hybrid_engine."""
        if self._rollouts is None:
            raise RuntimeError("generate needs hybrid_engine.enabled: true in the config")
        self._usage.note_altered()
        with self._meters.phase("generate"):
            return self._rollouts.generate(input_ids, attention_mask, options)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Adds the gradient of loss / gradient_accumulation_steps (of the loss itself with scale_wrt_gas=False, or where
        the caller manages the accumulation). Returns the loss so divided. After a step's last backward, `grad` of a parameter
        is this rank's rows of the mean over ranks, times `loss_scale`. Raises ValueError for what is not one number with a
        graph, and where gradients are there that another backward has left (zero_grad before this one drops those)."""
        if self.optimizer is None:
            raise RuntimeError("backward without an optimizer: give one to initialize, or a section `optimizer` in the config")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"backward takes one number that was computed by the engine's forward; given: {_in_short(loss)}; reduce it "
                "(loss.mean()), and compute it outside torch.no_grad()"
            )
        if self._waiting == 0 and self._has_gradients():
            self.discard_gradients()
            raise ValueError(f"backward: {FOREIGN}; the gradients were dropped")
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and self._eigenvalues is not None and self._eigenvalues.due(self.global_steps + 1):
            with self._meters.apart("eigenvalue"), self._mended_on_error():
                self._eigenvalues.measure(self.root, loss, self.global_steps + 1)
        self._announce(boundary)
        if boundary or self.zero_optimization_stage() in (0, 3):  # stages 1 and 2 keep what they have gathered until then
            self._usage.note_altered()
        self._last_loss = loss.detach()
        loss = loss if loss.dtype == torch.float64 else loss.float()  # a bf16 loss must not be divided in bf16
        if scale_wrt_gas and self.config.managed_gradient_accumulation:
            loss = loss / self.gradient_accumulation_steps()
        with self._meters.phase("backward"), self._mended_on_error():
            started = loss.sum() / self.config.divisors(self.world_size)[0]
            self._update.scaled(started).backward(retain_graph=retain_graph)
        if boundary and not retain_graph:  # stages 1 and 2 kept the weights, which hide the shards and their gradients
            sharding.reshard(self.root)
        self._waiting += 1
        self._is_synced = boundary or self.zero_optimization_stage() >= 2
        return loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """To be called after each backward. At a boundary: check, unscale, clip, step, advance the schedule (with `lr_kwargs`).

        A gradient that is not finite is a step that no rank takes: weights, moments and rate stay, skipped_steps counts it.
        Raises LossScaleError where that comes at the lowest loss scale; ValueError for a parameter without a gradient if those
        are not to be ignored, where ranks ran different layers, where weights were changed while a forward had gathered them,
        and for gradients that are not this step's: of loss.backward(), or of a last backward that was not announced as one.
        """
        if self.optimizer is None:
            raise RuntimeError("step without an optimizer: give one to initialize, or a section `optimizer` in the config")
        boundary = self.is_gradient_accumulation_boundary()
        self._check_gradients(boundary)
        if self._waiting == 0:
            return
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.mesh.world_size
        self._micro += 1
        if not boundary:
            return
        self.free_gathered()
        unused = self._unused(lr_kwargs or {})
        self._waiting = self._micro = 0
        with self._meters.phase("step"):
            taken = False
            try:
                self.last = stepped = self._update.step(unused=unused, schedule_kwargs=lr_kwargs or {})
                taken = not stepped.skipped
            finally:
                self._settle(taken=taken)
        self.global_steps += 1
        if stepped.skipped:
            self.skipped_steps += 1
            self._log.warning(
                "step %d was skipped: the gradient of %s is not finite%s", self.global_steps, in_words([*stepped.overflowed]),
                "" if self._update.scaler is None else f"; the loss scale is now {self._update.scaler.scale:g}",
            )  # fmt: skip
        report = self._meters.after_step(self.global_steps)
        self._write_scalars(stepped)
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.mesh.rank == 0:
            rate = None if report is None else report.get("train/samples_per_second")
            self._log.info("step=%d, skipped=%d, lr=%s, grad_norm=%.4g%s", self.global_steps, self.skipped_steps, self.get_lr(),
                           stepped.grad_norm, "" if rate is None else f", samples/s={rate * self.world_size:.1f}")  # fmt: skip

    def _write_scalars(self, stepped: Stepped) -> None:
        values = {"Train/Samples/lr": stepped.lr, "Train/Samples/grad_norm": stepped.grad_norm}
        if self._update.scaler is not None:
            values["Train/Samples/loss_scale"] = self.loss_scale
        if self._last_loss is not None and self._scalars:
            values["Train/Samples/train_loss"] = float(self._last_loss)
        if self._eigenvalues is not None:
            values |= self._eigenvalues.scalars(self.global_steps)
        for scalars in self._scalars:
            scalars.log(self.global_samples, values)

    def _checkpointing(self) -> AbstractContextManager[None]:
        """Where the config has no section, what the caller configured stays."""
        said = "activation_checkpointing" in self.config.model_fields_set
        return checkpointing.following(self.config.activation_checkpointing) if said else nullcontext()

    def _check_gradients(self, boundary: bool) -> None:
        """Whether a step would take the gradients that the caller means."""
        error = FOREIGN if self._waiting == 0 and self._has_gradients() else None
        if self._waiting and boundary and not self._is_synced:
            error = (
                "the last backward was no boundary (no_sync, or set_gradient_accumulation_boundary(False)), so its gradients "
                "were not added over ranks; say True before that backward, not after it"
            )
        if error is not None:
            self.discard_gradients()
            raise ValueError(f"step: {error}; the gradients were dropped")

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._update.parameters.values()) or in_flight.is_waiting(self.root)

    def _announce(self, boundary: bool) -> None:
        """Say before a backward whether it is the step's last."""
        sharding.set_sync(self.root, self.config.zero_optimization.stage, last=boundary)
        if self._update.mirror is not None:
            self._update.mirror.armed = boundary

    def _unused(self, lr_kwargs: Mapping[str, Any]) -> list[str]:
        """What the step leaves alone, since no rank's backward reached it. Where this raises, there is no gradient any more."""
        try:
            unused = self._usage.nowhere(", ".join(f"{name}={in_text(value)}" for name, value in lr_kwargs.items()))
            self._update.check_schedule(lr_kwargs)  # which are the same on all ranks
            if unused and not self.config.zero_optimization.ignore_unused_parameters:
                raise ValueError(f"no gradient reached {in_words(unused)}; freeze what is not used, or allow it: "
                                 "zero_optimization.ignore_unused_parameters: true")  # fmt: skip
        except ValueError:
            self.discard_gradients()
            raise
        return unused

    @contextmanager
    def _mended_on_error(self, *, drop: bool = True) -> Iterator[None]:
        """After an exception the module can run and train again, without half a gradient. drop=False, for what computes none:
        those that wait stay."""
        try:
            yield
        except BaseException:
            self._usage.note_altered()
            in_flight.abandon(self.root)
            if drop:
                self.discard_gradients()
            raise

    # -- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward that is next, or that waits for its call of `step`, is the last of an optimizer step."""
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return True
        return (self._micro + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Let the caller say it, for all that follows; None: by counting again."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are no boundary. Raises RuntimeError at stages 2 and 3, which reduce each gradient at once."""
        if self.zero_optimization_stage() >= 2:
            raise RuntimeError("no_sync at ZeRO stage 2 or 3, where every backward reduces its gradient; use stage 0 or 1")
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no backward of this engine has made (another engine's loss may have come through the module), as
        zero_grad of `module`, its parts and `optimizer` do. While a step accumulates, this does nothing: loops that call it
        before each backward mean to lose none, and a step drops its own. To drop those: `discard_gradients`."""
        if self._waiting == 0:
            self.discard_gradients()

    def _own_zero_grad(self) -> None:
        engine = weakref.ref(self)

        def zero_grad(set_to_none: bool = True) -> None:
            if (there := engine()) is not None:
                there.zero_grad()

        for part in [*self.module.modules(), *([] if self.optimizer is None else [self.optimizer])]:
            part.__dict__["zero_grad"] = zero_grad

    def discard_gradients(self) -> None:
        """Drop what earlier backwards of this step have left; its accumulation begins anew."""
        in_flight.discard_waiting(self.root)
        self._waiting = self._micro = 0
        self._update.drop()
        self._settle(taken=False)

    def free_gathered(self) -> None:
        """No weight is gathered any more; a change of one is noted, which the next step or save refuses."""
        self._usage.note_altered()
        sharding.reshard(self.root)

    def stored_weights(self) -> None:
        """Collective: shards and their copies in host memory are what the caller has made of the weights. Raises ValueError
        where some of that was lost."""
        self.free_gathered()
        self._usage.refuse_altered()
        self._update.take()

    def weights_were_loaded(self) -> None:
        """What was of the weights before, gradients and noted changes, is no more; those in host memory go to the device."""
        self.discard_gradients()
        self._usage.forget_altered()
        if self._update.mirror is not None:
            self._update.mirror.push()

    def _settle(self, *, taken: bool) -> None:
        self._usage.clear()
        for compressed in self._compressed:
            compressed.settle(taken=taken)

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective: all that training goes on from, to SAVE_DIR/TAG, whole or not at all; then SAVE_DIR/latest names it.

        tag: None: global_step{N}; whether ranks may give different ones is checkpoint.tag_validation's to say; rank 0's counts.
        client_state: plain values of the caller's (rank 0's), which load_checkpoint returns. With checkpoint.async_save this
        returns when tensors are copied to host memory; the next checkpoint verb, or wait_for_checkpoint, raises what the writing
        met. Returns True.

        Raises ValueError, on every rank if on any and before anything is written, for an empty save_dir, a bad tag, a
        client_state that is no JSON, and between the backwards of a step, whose gradients no checkpoint holds; FolderError where
        it cannot be written: what stood there before still stands.
        """
        return checkpoints.save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Collective: (folder, client_state), from any rank count, ZeRO stage and off-load. tag: None: what `latest` names; where
        there is no such file, (None, {}) and a warning. A folder of Hugging Face's (config.json and safetensors) gives weights
        alone, and with checkpoint.load_universal one of DeepSpeed's universal checkpoints is read. Gradients are dropped.

        load_module_strict=False: names may be on one side only. load_module_only: weights alone, no counters and no generators.
        load_optimizer_states: moments, the groups' rates and the loss scale.

        Raises ValueError, the same on every rank and before anything changes, for what is damaged or does not fit.
        """
        return checkpoints.load_checkpoint(
            self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def wait_for_checkpoint(self) -> None:
        """Until an asynchronous save is on the disk; call it before the process group is destroyed (the end of the process waits
        by itself). Raises what the writing met; then `latest` names the save before."""
        self._background.wait()

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective: one safetensors file of weights, each in the dtype in which it computes, and of buffers as they are.
        Returns False, with a warning, at stage 3 without stage3_gather_16bit_weights_on_model_save. Raises ValueError for another
        kind of file."""
        return weights.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Collective: the weights of a whole state dict, which every rank gives. Raises ValueError, with both lists, for other
        names, and for another shape, before anything changes."""
        weights.load_module_state_dict(self, state_dict)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Collective: the module's state dict, whole on every rank, in host memory and the masters' dtype."""
        return weights.module_state_dict(self, exclude_frozen_parameters)

    def destroy(self) -> None:
        """Wait for a save that is being written, close logs and free the generator's memory. The process group stays."""
        self._background.close()
        self._meters.close()
        for scalars in self._scalars:
            scalars.close()
        if self._rollouts is not None:
            self._rollouts.close()


def _in_short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.requires_grad else ' without a graph'}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} (its loss?)"
    return f"a {type(value).__name__}"
