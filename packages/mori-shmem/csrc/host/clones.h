// One copy of a loop for each vector width, chosen when the library is loaded. Sanitizers cannot run the choosing code (it
// runs before they are set up), and other machines need no choice.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define MORI_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MORI_VECTOR_CLONES
#endif
