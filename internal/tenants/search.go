package tenants

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"converger/internal/postgres"
)

// By name, as people look for it; the names are unique without regard to case, so that they are the order.
const searchTenantsQuery = `
SELECT ` + tenantColumns + `
FROM tenants
WHERE ($1::text = '' OR strpos(lower(name), lower($1)) > 0)
    AND ($2::uuid = '00000000-0000-0000-0000-000000000000' OR lower(name) > (SELECT lower(name) FROM tenants WHERE id = $2))
ORDER BY lower(name) LIMIT $3`

// SearchAllTenants returns up to limit tenants whose name holds the text ("": all), by name, those after the given tenant's
// ([uuid.Nil]: from the start). Case does not matter as far as the locale of the database knows it.
func (s *Store) SearchAllTenants(ctx context.Context, text string, after uuid.UUID, limit int) ([]Tenant, error) {
	list, err := postgres.Many(ctx, s.pool, scanTenant, searchTenantsQuery, text, after, limit)
	if err != nil {
		return nil, fmt.Errorf("search tenants: %w", err)
	}
	return list, nil
}
