// Functions that neither SLEEF nor the C library has, in double precision.
INLINE double digamma1(double x) {
    if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
    double result = 0;
    if (x < 0) {
        if (x == floor(x)) return __builtin_nan("");
        double f = x - __builtin_trunc(x);
        result = -3.14159265358979323846 / tan(3.14159265358979323846 * f);
        x = 1 - x;
    }
    while (x < 10) { result -= 1 / x; x += 1; }
    double r = 1 / (x * x);
    return result + log(x) - 0.5 / x
        - r * (1. / 12 - r * (1. / 120 - r * (1. / 252 - r * (1. / 240 - r * (1. / 132 - r * (691. / 32760 - r / 12))))));
}
INLINE double erfinv1(double y) {
    if (!(y >= -1 && y <= 1)) return __builtin_nan("");
    if (y == 1 || y == -1) return __builtin_copysign(__builtin_inf(), y);
    double w = log((1 - y) * (1 + y)), a = 0.147, t = 2 / (3.14159265358979323846 * a) + w / 2;
    double x = __builtin_copysign(sqrt(sqrt(t * t - w / a) - t), y);
    for (int k = 0; k < 3; ++k) {
        double e = (erf(x) - y) / (1.12837916709551257390 * exp(-x * x));
        x -= e / (1 + x * e);
    }
    return y == 0 ? y : x;
}
INLINE double ndtri1(double p) { return 1.41421356237309504880 * erfinv1(2 * p - 1); }
INLINE double bessel_i(double x, int order, bool scaled) {
    double a = fabs(x), sum, term;
    if (a < 30) {
        term = order ? a / 2 : 1; sum = term;
        for (int k = 1; k < 200 && term > sum * 1e-18; ++k) { term *= (a * a / 4) / (k * (double)(k + order)); sum += term; }
        if (scaled) sum *= exp(-a);
    } else {
        double mu = 4.0 * order * order; term = 1; sum = 1;
        for (int k = 1; k < 30; ++k) {
            double next = term * -(mu - (2 * k - 1) * (2.0 * k - 1)) / (k * 8 * a);
            if (fabs(next) >= fabs(term)) break;
            term = next; sum += term;
        }
        sum /= sqrt(2 * 3.14159265358979323846 * a);
        if (!scaled) sum *= exp(a / 2) * 1.0 * exp(a / 2);
    }
    return order && x < 0 ? -sum : sum;
}
INLINE double i01(double x) { return bessel_i(x, 0, false); }
INLINE double i0e1(double x) { return bessel_i(x, 0, true); }
INLINE double i11(double x) { return bessel_i(x, 1, false); }
INLINE double i1e1(double x) { return bessel_i(x, 1, true); }
