// Integer arithmetic with Python's and eager's meaning; no input traps. Of vectors, lane by lane.
#define OF_ONE(f) if constexpr (sizeof(x < y) > 1) { \
    T z; _Pragma("GCC unroll 64") for (int l = 0; l < L; ++l) z[l] = f(x[l], y[l]); return z; } else
template <class T> INLINE T idiv(T x, T y) { return y == 0 ? (T)0 : (T)-1 < 0 && y == (T)-1 ? (T)(0 - x) : (T)(x / y); }
template <class T> INLINE T floordiv_(T x, T y) {
    OF_ONE(floordiv_) { T q = idiv(x, y), r = x - q * y; return q - (T)(r != 0 && (r < 0) != (y < 0)); }
}
template <class T> INLINE T truncdiv_(T x, T y) { OF_ONE(truncdiv_) return idiv(x, y); }
template <class T> INLINE T remainder_(T x, T y) {
    OF_ONE(remainder_) { T r = x - idiv(x, y) * y; return r != 0 && (r < 0) != (y < 0) ? (T)(r + y) : r; }
}
template <class T> INLINE T fmod_(T x, T y) { OF_ONE(fmod_) return x - idiv(x, y) * y; }
template <class T> INLINE T pow_(T x, T y) {
    OF_ONE(pow_) {
        if (y < 0) return x == 1 ? 1 : x == (T)-1 ? (y % 2 ? -1 : 1) : 0;
        T r = 1; while (y) { if (y & 1) r *= x; x *= x; y /= 2; } return r;
    }
}
template <class T> INLINE T maximum_(T x, T y) { return x > y ? x : y; }
template <class T> INLINE T minimum_(T x, T y) { return x < y ? x : y; }
