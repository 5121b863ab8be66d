// Integer arithmetic with Python's and eager's meaning; no input traps.
template <class T> INLINE T idiv(T x, T y) { return y == 0 ? (T)0 : (T)-1 < 0 && y == (T)-1 ? (T)(0 - x) : (T)(x / y); }
template <class T> INLINE T floordiv_(T x, T y) { T q = idiv(x, y), r = x - q * y; return q - (T)(r != 0 && (r < 0) != (y < 0)); }
template <class T> INLINE T truncdiv_(T x, T y) { return idiv(x, y); }
template <class T> INLINE T remainder_(T x, T y) { T r = x - idiv(x, y) * y; return r != 0 && (r < 0) != (y < 0) ? (T)(r + y) : r; }
template <class T> INLINE T fmod_(T x, T y) { return x - idiv(x, y) * y; }
template <class T> INLINE T pow_(T x, T n) {
    if (n < 0) return x == 1 ? 1 : x == (T)-1 ? (n % 2 ? -1 : 1) : 0;
    T r = 1; while (n) { if (n & 1) r *= x; x *= x; n /= 2; } return r;
}
