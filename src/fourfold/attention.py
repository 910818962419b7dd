"""ff.attention: masks that torch's attention takes, and that make no matrix.

Law: with them, `scaled_dot_product_attention` gives what it gives with the matrix, on any mesh.
"""

from fourfold.axes.context.work.document_mask import DocumentMask

__all__ = ["DocumentMask"]
