# SPDX-License-Identifier: Apache-2.0
"""The forms in which a finished run is told."""
