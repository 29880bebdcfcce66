#include "coherence/checker.hpp"
namespace mori_sim {
std::unique_ptr<Checker> make_checker(ExecContext&) { return nullptr; }
}
