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
