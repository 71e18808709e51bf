# SPDX-License-Identifier: Apache-2.0
"""The state-space kernels: importable, none of them implemented."""

from sgl_kernel import __getattr__ as __getattr__
