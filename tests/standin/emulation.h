// CUDA's language on the CPU: enough of it to run the kernels of mpishard/array/kernels as they stand.
//
// [Note: fibers]
// The blocks of a launch run one after another, and the threads of a block as fibers of the OS thread that launched. A
// thread that meets no barrier runs to its end, and the next one follows on the same fiber, without a switch. At a
// barrier a thread sleeps; the last to arrive wakes the others. When nobody is awake and somebody sleeps, threads went
// different ways around a barrier: the launch ends with a message. All state belongs to the OS thread, so several may
// launch at a time.
//
// A launch may take its blocks and threads backwards. Forwards, whoever was woken first goes on first, so all threads
// keep step; backwards, whoever was woken last does, so that a warp runs ahead as far as barriers let it. What a
// missing barrier leaves to luck comes out differently.

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace emulation {

// The compiler's own pair keeps less and needs no call: a switch takes a third of the time where it exists.
#ifdef __x86_64__
typedef void* Point[5];
#define REMEMBER(point) __builtin_setjmp(point)
#define RETURN_TO(point) __builtin_longjmp(point, 1)
#else
typedef jmp_buf Point;
#define REMEMBER(point) _setjmp(point)
#define RETURN_TO(point) _longjmp(point, 1)
#endif

constexpr unsigned MOST = 1024;  // threads of a block
constexpr unsigned LANES = 32;
constexpr size_t STACK = 65 * 1024 - 64;  // no multiple of a page: tops of stacks would share cache lines

struct Dim {
    unsigned x = 0;
};

struct Fiber {
    Point point;
    char* stack = nullptr;
    bool made = false;
};

// A barrier of a block or of a warp: how many sleep at it, and where in the text.
struct Gate {
    unsigned sleeping = 0;
    int line = 0;
};

struct Machine {
    // the launch
    void (*kernel)(void*) = nullptr;
    void* arguments = nullptr;
    bool backwards = false;
    char error[300] = "";
    // the block; a thread is its index, its fiber is fiber_of[index]
    Dim thread, block, grid, threads;
    unsigned born = 0, ended = 0;
    bool over[MOST];
    unsigned fiber_of[MOST];
    Gate block_gate, warp_gates[MOST / LANES];
    int votes = 0, counted = 0;                   // of __syncthreads_count: those given, and the sum that is taken
    unsigned long long given[MOST], taken[MOST];  // what shuffles exchange
    unsigned ready[MOST], first_ready = 0, ready_size = 0;
    // a resting fiber has no thread
    Fiber fibers[MOST];
    unsigned resting[MOST], resting_size = 0, made = 0, current = 0;
    Point home;

    ~Machine() {
        for (Fiber& fiber : fibers) free(fiber.stack);
    }
};

struct Owner {  // ends the machine with its OS thread
    Machine* machine = nullptr;
    ~Owner() { delete machine; }
};

inline thread_local Owner owner;
inline thread_local Machine* machine = nullptr;

inline void run_threads();

[[noreturn]] inline void go_to(Machine& m, unsigned fiber) {
    Fiber& f = m.fibers[fiber];
    m.current = fiber;
    if (f.made) RETURN_TO(f.point);
    f.made = true;
    if (!f.stack) f.stack = (char*)malloc(STACK);
    ucontext_t context;
    if (!f.stack || getcontext(&context)) abort();
    context.uc_stack.ss_sp = f.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, run_threads, 0);
    setcontext(&context);
    abort();
}

// Go on with what can run: a thread that was woken, one that has not begun, or the launch.
[[noreturn]] inline __attribute__((noinline)) void go_on(Machine& m) {
    if (m.ready_size > 0) {
        unsigned place = m.first_ready + --m.ready_size;  // the one woken last
        if (!m.backwards) {
            place = m.first_ready;
            m.first_ready = (m.first_ready + 1) % MOST;
        }
        go_to(m, m.fiber_of[m.ready[place % MOST]]);
    }
    if (m.born == m.threads.x) RETURN_TO(m.home);
    go_to(m, m.resting_size > 0 ? m.resting[--m.resting_size] : m.made++);
}

// Leave the fiber until somebody goes to it.
inline __attribute__((noinline)) void leave(Machine& m) {
    if (REMEMBER(m.fibers[m.current].point) == 0) go_on(m);
}

// What every fiber does: threads that have not begun, one after another.
inline void run_threads() {
    Machine& m = *machine;
    for (;;) {
        if (m.ready_size == 0 && m.born < m.threads.x) {
            unsigned thread = m.backwards ? m.threads.x - 1 - m.born : m.born;
            m.born++;
            m.over[thread] = false;
            m.fiber_of[thread] = m.current;
            m.thread.x = thread;
            m.kernel(m.arguments);
            m.over[m.thread.x] = true;
            m.ended++;
        } else {
            m.resting[m.resting_size++] = m.current;
            leave(m);
        }
    }
}

[[noreturn]] inline __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
    Machine& m = *machine;
    va_list values;
    va_start(values, format);
    vsnprintf(m.error, sizeof m.error, format, values);
    va_end(values);
    RETURN_TO(m.home);
}

// Sleep at a gate of the threads from first to last until `wanted` have come.
inline void pass(Machine& m, Gate& gate, unsigned first, unsigned wanted, int line) {
    unsigned thread = m.thread.x;
    if (gate.sleeping == 0) gate.line = line;
    if (gate.line != line)
        fail("thread %u of block %u waits in line %d and others in line %d", thread, m.block.x, line, gate.line);
    if (++gate.sleeping < wanted) {
        leave(m);
        m.thread.x = thread;
        return;
    }
    gate.sleeping = 0;
    for (unsigned i = 0; i < wanted; i++) {
        unsigned other = first + i;
        if (other == thread) continue;
        m.ready[(m.first_ready + m.ready_size++) % MOST] = other;
    }
}

inline void say_who_waits() {
    Machine& m = *machine;
    const char* format = "%u of %u threads of block %u wait in line %d, %u have ended: not all reached it";
    for (unsigned warp = 0; warp < m.threads.x / LANES; warp++) {
        if (m.warp_gates[warp].sleeping == 0) continue;
        unsigned over = 0;
        for (unsigned lane = 0; lane < LANES; lane++) over += m.over[warp * LANES + lane];
        snprintf(m.error, sizeof m.error, format, m.warp_gates[warp].sleeping, LANES, m.block.x,
                 m.warp_gates[warp].line, over);
        return;
    }
    snprintf(m.error, sizeof m.error, format, m.block_gate.sleeping, m.threads.x, m.block.x, m.block_gate.line,
             m.ended);
}

// Whether the block came to its end.
inline bool run_block() {
    Machine& m = *machine;
    m.born = m.ended = 0;
    if (REMEMBER(m.home) == 0) go_on(m);
    if (m.ended < m.threads.x && !m.error[0]) say_who_waits();
    return !m.error[0];
}

template <typename Body>
const char* launch(unsigned first, unsigned grid, unsigned block, int backwards, Body& body) {
    if (!machine) machine = owner.machine = new Machine;
    Machine& m = *machine;
    m.kernel = [](void* arguments) { (*(Body*)arguments)(); };
    m.arguments = &body;
    m.backwards = backwards;
    m.grid.x = grid;
    m.threads.x = block;
    m.error[0] = 0;
    for (unsigned i = first; i < grid; i++) {
        m.block.x = backwards ? grid - 1 - (i - first) : i;
        if (run_block()) continue;
        // Threads were left in the middle: their fibers begin anew.
        for (Fiber& fiber : m.fibers) fiber.made = false;
        for (Gate& gate : m.warp_gates) gate = Gate();
        m.block_gate = Gate();
        m.made = m.resting_size = m.ready_size = 0;
        m.votes = 0;
        return m.error;
    }
    return nullptr;
}

// --- barriers and shuffles

inline int sync_block(int line, int vote) {
    Machine& m = *machine;
    m.votes += vote != 0;
    // The last to arrive leaves the sum; all take it before any of them can arrive at the next barrier's end.
    unsigned threads = m.threads.x;
    if (m.block_gate.sleeping + 1 == threads) {
        m.counted = m.votes;
        m.votes = 0;
    }
    pass(m, m.block_gate, 0, threads, line);
    return m.counted;
}

inline void sync_warp(Machine& m, int line, unsigned mask) {
    unsigned warp = m.thread.x / LANES;
    if (mask != 0xffffffffu) fail("line %d names %#x; whole warps alone are emulated", line, mask);
    if (m.warp_gates[warp].sleeping + 1 == LANES)
        memcpy(m.taken + warp * LANES, m.given + warp * LANES, LANES * sizeof *m.taken);
    pass(m, m.warp_gates[warp], warp * LANES, LANES, line);
}

// The value of another lane.
template <typename Value>
Value shuffle_xor(int line, unsigned mask, Value value, int distance) {
    static_assert(sizeof(Value) <= sizeof *machine->given, "shuffles take 8 bytes at most");
    Machine& m = *machine;
    unsigned thread = m.thread.x;
    memcpy(m.given + thread, &value, sizeof value);
    sync_warp(m, line, mask);
    memcpy(&value, m.taken + (thread ^ (unsigned)distance), sizeof value);
    return value;
}

template <typename To, typename From>
To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace emulation

#define __global__
#define __device__
#define __shared__ static thread_local
#define threadIdx (emulation::machine->thread)
#define blockIdx (emulation::machine->block)
#define blockDim (emulation::machine->threads)
#define gridDim (emulation::machine->grid)
#define __syncthreads() (void)emulation::sync_block(__LINE__, 0)
#define __syncthreads_or(vote) (emulation::sync_block(__LINE__, vote) != 0)
#define __syncthreads_count(vote) emulation::sync_block(__LINE__, vote)
#define __syncwarp() emulation::sync_warp(*emulation::machine, __LINE__, 0xffffffffu)
#define __shfl_xor_sync(mask, value, distance) emulation::shuffle_xor(__LINE__, mask, value, distance)

inline unsigned __float_as_uint(float x) { return emulation::same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulation::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::same_bits<long long>(x); }

// What common.cuh has the processor convert, from and to the bits of float16, bit by bit.
inline float float_of_half(unsigned short bits) {
    unsigned sign = (unsigned)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, digits = bits & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | (digits ? 0x7fc00000 | digits << 13 : 0x7f800000));
    if (exponent > 0) return __uint_as_float(sign | (exponent + 112) << 23 | digits << 13);
    float magnitude = (float)digits * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}
inline unsigned short half_of(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;                           // NaN, as the processor writes it
    if (magnitude >= 0x477ff000) return (unsigned short)(sign | 0x7c00);  // 65520
    if (magnitude < 0x38800000) {                                        // 2**-14
        // The last place of 0.5 is 2**-24, the unit of small numbers: the addition rounds.
        unsigned units = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000;
        return (unsigned short)(sign | units);
    }
    magnitude -= 112u << 23;
    return (unsigned short)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
inline unsigned short half_of(double value) {
    // By way of a float that is cut off, with its last bit set where anything was lost: it is on the same side of every
    // tie as the double.
    float near = (float)value;
    unsigned bits = __float_as_uint(near);
    if (near != value && value == value) bits = (fabs((double)near) > fabs(value) ? bits - 1 : bits) | 1;
    return half_of(__uint_as_float(bits));
}

inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned long long atomicAdd(unsigned long long* x, unsigned long long value) {
    return __atomic_fetch_add(x, value, __ATOMIC_RELAXED);
}
