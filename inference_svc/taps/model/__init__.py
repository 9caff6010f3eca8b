"""The structure of a model, found by running it, and the insertion of the ops. No module here imports vLLM.

* Names of modules differ between models, but the flow of tensors does not. So the model runs four tokens before it is
  compiled, and `structure` notes the tensors that go into and out of each module. A layer's output is the input of the
  next layer and of its first norm. In such a run attention computes nothing and returns memory that was never written,
  so fixed numbers replace its outputs.
* A layer may return two tensors. `residual` finds out by experiment whether the residual stream is their sum or the
  first one. If neither holds, the model is refused.
* The attention is the part of a layer that contains vLLM's attention or a state space. The MLP is the last part after
  it. If `attn_out` or `mlp_out` is enabled, the model runs once more, and the parts must add up to what each layer
  adds. A model that scales or merges its parts is refused by name; it can be served without these sites.
* Queries and keys before their norm and rotary embedding are columns of one projection. An experiment finds out which:
  if some columns change, only the queries that the attention takes may change, or only the keys.
* The final norm is the norm after the last layer whose rows the model returns.
"""
