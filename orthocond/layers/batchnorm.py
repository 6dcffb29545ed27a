"""Decorrelated batch normalization: features whitened by P^-1/2 (paper: section 6.1, decorrelated BN)."""

from orthocond.layers.decorrelated import _DecorrelatedBatchNorm


class DecorrelatedBatchNorm1d(_DecorrelatedBatchNorm):
    """`DecorrelatedBatchNorm2d` for features ``(N, C)`` or ``(N, C, L)``, in place of ``nn.BatchNorm1d``.

    Example:
        >>> DecorrelatedBatchNorm1d(32, groups=4)(torch.randn(100, 32)).shape
        torch.Size([100, 32])
    """

    _dims = (2, 3)


class DecorrelatedBatchNorm2d(_DecorrelatedBatchNorm):
    r"""Batch normalization that also decorrelates the channels, in place of ``nn.BatchNorm2d``.

    In training :math:`y = \gamma \circ (P + \varepsilon I)^{-1/2} (x - \mu) + \beta` with mean :math:`\mu` and biased
    covariance :math:`P` over batch and positions. Evaluation uses their running averages, with more variance where
    these lag behind. Arguments, defaults, modes and names are those of ``nn.BatchNorm2d``, except that
    ``running_covariance`` and ``excess`` replace ``running_var``. It also loads the state of ``nn.BatchNorm2d``
    (variances become a diagonal covariance, which changes nothing in evaluation).

    Running averages lag behind weights that move, and whitening multiplies the lag. If the layer before has at least as
    many outputs as inputs, follow it: ``model.bn1.follow(model.conv1)`` removes the lag of its weight; see `follow`.

    Mean and covariance take one pass, accumulated in float64, and the whole map is one matrix product, with the memory
    of plain batch normalization. Gradients are exact where eigenvalues repeat, and can be differentiated twice (with
    `Eigh`). The whitening matrix of evaluation is computed when the layer enters evaluation, and again when its
    statistics have changed in any way. It is stored in the buffer ``whitening``, so that exported graphs hold no
    decomposition. Statistics stay in float32 under ``half()`` and ``bfloat16()``; half-precision features are whitened
    in float32.

    A batch with NaN or infinity makes the output NaN, as in ``nn.BatchNorm2d``, so that a gradient scaler skips the
    step. The running statistics leave such a batch out, and also one whose statistics overflow their dtype. The buffer
    ``skipped_batches`` (not in the state) counts both.

    Args:
        num_features: Number of channels C.
        eps: Ridge added to every eigenvalue of the covariance.
        momentum: Weight of the new batch in the running statistics; None averages all batches equally.
        affine: Whether the layer has ``weight`` and ``bias``.
        track_running_stats: Whether to keep running statistics; without them evaluation uses the batch too.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and, if it is not a half precision, of buffers.
        bias: Whether the layer has ``bias``, where it has ``weight``.
        groups: Number of equal groups of channels, each whitened by itself. A group needs fewer samples.
        solver: How the inverse root is computed.
        average: What is averaged for evaluation. ``"covariance"`` keeps ``running_covariance`` ``(groups, C / groups,
            C / groups)``, unbiased as in ``nn.BatchNorm2d``. ``"whitening"`` keeps ``running_whitening``, as the
            authors of the paper do; with few samples its mean is biased, since :math:`E[P^{-1/2}] \neq E[P]^{-1/2}`.
        lag: What evaluation does where the running covariance :math:`R` lags behind weights that move. ``"cover"`` adds
            the positive part of :math:`P - (1 + \sqrt{c / n})^2 R`, the excess of the last batch of n samples and
            groups of c channels over what chance explains, kept in the buffer ``excess``; ``"ignore"`` adds nothing.
            Averages of whitening matrices are taken as they are.
        nonfinite: What happens with NaN or infinity in training: ``"propagate"`` it to the output, or ``"raise"``.
        synchronize: Whether the batch is that of all processes, as in ``nn.SyncBatchNorm``; also set by
            `convert_sync`. It works on any backend, CPU included, and with batches of different sizes.
        process_group: The processes to synchronize with; None means all.

    Raises:
        TypeError: If ``solver`` is not a `Solver`, or the input is not a real floating-point tensor.
        ValueError: If ``groups`` does not divide the channels, ``momentum`` is not a fraction, the input has another
            number of dimensions or channels, one value per channel in training, or, with ``nonfinite="raise"``, values
            that are not finite.

        RuntimeError: If no whitening matrix can be computed from the running covariance in evaluation; it names the
            layer.

    Warns:
        UserWarning: Once, if a batch in training has no more samples than a group has channels; and if evaluation finds
            a running covariance that is not finite or has negative eigenvalues.

    Accuracy:
        The output's covariance deviates from :math:`P (P + \varepsilon I)^{-1}`, which is the identity for
        :math:`\varepsilon = 0`, by about the machine epsilon times the root of the condition number in float32 (1e-6 at
        1e4, 1e-4 at 1e8), and times the condition number in float64. With ``eps=0``, directions whose variance is only
        rounding of the features come out as 0.

    Example:
        >>> layer = DecorrelatedBatchNorm2d(3)
        >>> x = torch.randn(8, 3, 16, 16) @ torch.randn(16, 16) + 5
        >>> y = layer(x)
        >>> print(torch.cov(y.movedim(1, 0).flatten(1), correction=0).round(decimals=3).abs())
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]], grad_fn=<AbsBackward0>)

    References:
        Song, Sebe, Wang (2022), section 6.1. Huang et al., *Decorrelated Batch Normalization* (2018).
    """

    _dims = (4,)


class DecorrelatedBatchNorm3d(_DecorrelatedBatchNorm):
    """`DecorrelatedBatchNorm2d` for features ``(N, C, D, H, W)``, in place of ``nn.BatchNorm3d``.

    Example:
        >>> DecorrelatedBatchNorm3d(4)(torch.randn(2, 4, 5, 6, 7)).shape
        torch.Size([2, 4, 5, 6, 7])
    """

    _dims = (5,)
