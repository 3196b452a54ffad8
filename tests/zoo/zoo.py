"""All specimens, and what torch cannot do with some of them though nobody is watching."""

from tests.zoo import convolutions, language, others, sense, sequences
from tests.zoo.specimen import Specimen

SPECIMENS: dict[str, Specimen] = {
    specimen.name: specimen
    for part in (convolutions, sequences, others, language, sense)
    for specimen in part.SPECIMENS
}

UNCHECKPOINTABLE = {"XLM": "keeps a cache that the second forward extends"}
