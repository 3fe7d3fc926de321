"""EROFS metadata images: ``writer.render`` a tree, ``reader.Image`` reads one, ``verify.compare`` proves one, ``dump.dump`` shows one. Bytes in, bytes out."""
