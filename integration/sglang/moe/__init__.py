"""The backend inside SGLang's MoE layers: one dispatcher per layer.

``create_moe_dispatcher`` of SGLang hands over to `forms.create`, which chooses a class by the
device and by the runner that computes the layer's experts:

* ``cuda``: local ids, -1 for what is not computed here (Triton, triton_kernel, DeepGEMM); or global
  ids, and a padding id (cutlass, trtllm, cutedsl; DeepGEMM in BF16);
* ``cpu``: one row per local choice, for SGLang's native CPU experts.

All of them extend `base.MoeNvlinkDispatcher`. ``runners`` says what each runner takes,
``experts_input`` what a layer's quantisation asks for, ``routing`` reads SGLang's four forms of
top-k, ``streams`` says what a step must wait for. ``fused`` registers SGLang's fused functions
under our backend's name.
"""
