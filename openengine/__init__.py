# SPDX-License-Identifier: Apache-2.0
"""Python bindings of the OpenEngine contract."""
